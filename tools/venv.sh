#!/usr/bin/env bash
# Makes the virtual environment that `make quickstart` and `make test` use, or finds it made, and prints its path.
#
#   SLAB_DET_VENV   where it is (default: a folder below ~/.cache, one for each set of requirements and Python version)
#   PYTHON          the interpreter to make it with (default: python3, or else the newest of 3.13 to 3.10)
#   SLAB_DET_LOCK   off: install the newest versions that pyproject.toml allows, not those of requirements/lock.txt
#
# The path is the only line on stdout; everything else goes to stderr. Clones share environments, so they hold the
# dependencies and not slab_det itself: an editable install points to one checkout, and would run the code of a clone
# other than the one you stand in, or none at all after that clone is deleted.
set -euo pipefail
exec 3>&1 1>&2

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Settings for other environments that would send packages elsewhere.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "venv.sh: $*"
    exit 1
}

is_suitable() {
    # ensurepip: Debian ships it, and with it a working `python -m venv`, in a package of its own.
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

choose_python() {
    local candidates=(python3 python3.13 python3.12 python3.11 python3.10) candidate
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if is_suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

python=$(choose_python) || fail "needs Python 3.10 to 3.13 with its venv module, and ${PYTHON:-python3} is not that." \
    "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make ..."

# Exactly the versions that were tested, by their hashes, where all of them exist.
lock=$repo/requirements/lock.txt
requirements=$lock
case ${SLAB_DET_LOCK:-on},$(uname -sm) in
on,"Linux x86_64" | on,"Linux aarch64" | on,"Darwin arm64") ;;
on,*) why="no versions are pinned for $(uname -sm)" lock= ;;
off,*) why='SLAB_DET_LOCK=off' lock= ;;
*) fail "SLAB_DET_LOCK is on or off, not $SLAB_DET_LOCK." ;;
esac
[[ -n $lock ]] || requirements=$repo/pyproject.toml

key=$("$python" - "$requirements" <<'PY'
import hashlib, platform, sys
with open(sys.argv[1], 'rb') as file:
    digest = hashlib.sha256(file.read())
# The machine: clusters share home directories.
print(f'py{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}-{digest.hexdigest()[:12]}')
PY
)
venv=${SLAB_DET_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/slab_det/venv-$key}
state=$venv/.slab_det

mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")

# One at a time. The lock belongs to this open file, so it ends with this process and with whatever it started: after a
# kill, a pip that goes on alone is waited for. (Python, because not every system has the command flock.)
exec 9>"$venv.lock"
"$python" - <<'PY'
import fcntl, sys
try:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print('Waiting for another set-up to finish ...', flush=True)
        fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f'Cannot lock ({error}); do not run two set-ups at a time.')
PY

# Written last: what was half made is made again. The interpreter of an old environment may have gone.
if [[ $(cat "$state" 2>/dev/null) != "complete $key" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    # Nothing is deleted that this script did not make.
    if [[ ! -e $state && -n $(ls -A "$venv" 2>/dev/null) ]]; then
        fail "$venv exists and is not an environment of slab_det: choose another SLAB_DET_VENV."
    fi
    echo "Setting up $venv (a few minutes, about 6 GB with CUDA libraries) ..."
    "$python" -m venv --clear "$venv"
    echo building >"$state"
    if [[ -n $lock ]]; then
        # The lock names every package, so none is looked for beside it. pip hashes no editable install: there is none.
        "$venv/bin/python" -m pip install --require-hashes --no-deps -r "$lock" || fail \
            'pip cannot install the versions of requirements/lock.txt, see above. If their hashes do not match, the' \
            'packages are not those that were tested: find out why. Else SLAB_DET_LOCK=off make ... takes others.'
    else
        echo "Taking the newest versions that pyproject.toml allows, because $why."
        "$venv/bin/python" -m pip install -e "$repo[test]"
        "$venv/bin/python" -m pip uninstall --yes --quiet slab_det
    fi
    echo "complete $key" >"$state"
fi
echo "$venv" >&3
