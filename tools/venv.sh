#!/usr/bin/env bash
# Prints the path of the virtual environment for `make quickstart` and `make test`, and creates it if needed.
#
#   SLAB_DET_VENV   where it is (default: a folder below ~/.cache, one for each requirements/lock.txt and Python version)
#   PYTHON          the interpreter that creates it (default: python3, or else the newest of 3.13 to 3.10)
#
# The path is the only line on stdout; everything else goes to stderr. Clones share an environment, so it holds
# the dependencies but not slab_det: an editable install would run the code of one clone in all other clones, and fail
# after that clone is deleted.
set -euo pipefail
exec 3>&1 1>&2

lock=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/requirements/lock.txt

# Unset variables that would install packages elsewhere. The user's pip configuration, such as the index, stays in use;
# uv would not read it.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "venv.sh: $*"
    exit 1
}

# Prints the name of the environment for an interpreter, or fails if `python -m venv` would: Debian has ensurepip in a
# separate package. The name contains the machine type, because clusters share home directories.
name_environment() {
    "$1" - "$lock" 2>/dev/null <<'PY'
import ensurepip, hashlib, platform, sys, venv
assert (3, 10) <= sys.version_info[:2] <= (3, 13)
with open(sys.argv[1], 'rb') as file:
    digest = hashlib.sha256(file.read()).hexdigest()
print(f'py{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}-{digest[:12]}')
PY
}

candidates=(python3 python3.13 python3.12 python3.11 python3.10)
[[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
for python in "${candidates[@]}"; do
    key=$(name_environment "$python") && break
done
[[ -n $key ]] || fail "needs Python 3.10 to 3.13 with its venv module, and ${PYTHON:-python3} is not one." \
    "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make ..."

venv=${SLAB_DET_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/slab_det/venv-$key}
mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
state=$venv/.slab_det

# One set-up at a time. Child processes inherit the open file and keep the lock: if this script is killed, the next one
# waits for its pip. (Python takes the lock, because not every system has the command flock.)
exec 9>"$venv.lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
    echo 'Waiting for another set-up to finish ...'
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || echo 'Cannot lock: do not run two set-ups at a time.'
}

# The state file is written last, so an incomplete environment is created again, as is one whose interpreter is gone.
if [[ $(cat "$state" 2>/dev/null) != "complete $key" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    # Do not delete a folder that this script did not create.
    if [[ ! -e $state && -n $(ls -A "$venv" 2>/dev/null) ]]; then
        fail "$venv exists and is not an environment of slab_det: choose another SLAB_DET_VENV."
    fi
    echo "Setting up $venv (a few minutes, about 7 GB with CUDA libraries) ..."
    "$python" -m venv --clear "$venv"
    echo building >"$state"
    # --no-deps: the lock file already contains every dependency.
    "$venv/bin/python" -m pip install --require-hashes --no-deps -r "$lock" || fail \
        'pip cannot install the versions of requirements/lock.txt, see above. If a hash does not match, the package' \
        'differs from the tested one: find out why.'
    echo "complete $key" >"$state"
fi
echo "$venv" >&3
