#!/usr/bin/env bash
# Makes the virtual environment that `make quickstart` and `make test` use, or finds it made, and prints its path.
#
#   SLAB_DET_VENV   where it is (default: a folder below ~/.cache, one for each requirements/lock.txt and Python version)
#   PYTHON          the interpreter to make it with (default: python3, or else the newest of 3.13 to 3.10)
#
# The path is the only line on stdout; everything else goes to stderr. Clones share environments, so they hold the
# dependencies and not slab_det itself: an editable install points to one checkout, and would run the code of a clone
# other than the one you stand in, or none at all after that clone is deleted.
set -euo pipefail
exec 3>&1 1>&2

lock=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/requirements/lock.txt

# Settings for other environments that would send packages elsewhere. The index and the like stay the user's, which is
# why this is pip and not uv: uv does not read pip's configuration.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "venv.sh: $*"
    exit 1
}

# The name of the environment that an interpreter makes, or an error where it makes none: Debian has ensurepip, and with
# it a working `python -m venv`, in a package of its own. The machine is in the name: clusters share home directories.
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
[[ -n $key ]] || fail "needs Python 3.10 to 3.13 with its venv module, and ${PYTHON:-python3} is not that." \
    "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make ..."

venv=${SLAB_DET_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/slab_det/venv-$key}
mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
state=$venv/.slab_det

# One at a time. The lock belongs to this open file, so it ends with this process and with whatever it started: after a
# kill, a pip that goes on alone is waited for. (Python, because not every system has the command flock.)
exec 9>"$venv.lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
    echo 'Waiting for another set-up to finish ...'
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || echo 'No lock: do not run two set-ups at a time.'
}

# Written last: what was half made is made again. The interpreter of an old environment may have gone.
if [[ $(cat "$state" 2>/dev/null) != "complete $key" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    # Nothing is deleted that this script did not make.
    if [[ ! -e $state && -n $(ls -A "$venv" 2>/dev/null) ]]; then
        fail "$venv exists and is not an environment of slab_det: choose another SLAB_DET_VENV."
    fi
    echo "Setting up $venv (a few minutes, about 6 GB with CUDA libraries) ..."
    "$python" -m venv --clear "$venv"
    echo building >"$state"
    # The lock names every package, so none is looked for beside it.
    "$venv/bin/python" -m pip install --require-hashes --no-deps -r "$lock" || fail \
        'pip cannot install the versions of requirements/lock.txt, see above. If their hashes do not match, the packages' \
        'are not those that were tested: find out why.'
    echo "complete $key" >"$state"
fi
echo "$venv" >&3
