#!/usr/bin/env bash
# Prints the path of the virtual environment for `make quickstart` and `make test`, and creates it if needed.
#
#   tools/venv.sh             requirements/run.txt, and gpu.txt on a machine with a GPU
#   tools/venv.sh test        the same environment, with test.txt too
#
#   SLAB_DET_VENV         where it is (default: a folder below ~/.cache, one for each requirements/ and Python version)
#   SLAB_DET_TORCH_INDEX  package index from which PyTorch and torchvision come, such as that of PyTorch's builds for CPUs,
#                         which pytorch.org names; then nothing of CUDA is installed, and these two have no hashes
#   PYTHON                the interpreter that creates it (default: python3, or else the newest of 3.13 to 3.10)
#
# The path is the only line on stdout; everything else goes to stderr. Clones share an environment, so it holds
# the dependencies but not slab_det: an editable install would run the code of one clone in all other clones, and fail
# after that clone is deleted.
set -euo pipefail
exec 3>&1 1>&2

locks=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/requirements
index=${SLAB_DET_TORCH_INDEX:-}

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
    "$1" - "$index" "$locks"/{run,gpu,test}.txt 2>/dev/null <<'PY'
import ensurepip, hashlib, platform, sys, venv
assert (3, 10) <= sys.version_info[:2] <= (3, 13)
digest = hashlib.sha256(sys.argv[1].encode())
for name in sys.argv[2:]:
    with open(name, 'rb') as file:
        digest.update(file.read())
print(f'py{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}-{digest.hexdigest()[:12]}')
PY
}

# Prints pip's output as one line and a bar, or what it said if it fails.
show_progress() {
    "$python" -c '
import re, sys
name, total = sys.argv[1], int(sys.argv[2])
lines, found, shown = [], 0, -1
for line in sys.stdin:
    lines.append(line)
    found += line.startswith(("Collecting ", "Requirement already satisfied"))
    share = min(found * 20 // total, 20)
    doing = "unpacking, a minute or more" if line.startswith("Installing collected") else f"{found} of {total} packages"
    if sys.stderr.isatty():
        print(f"\r{name} [{share * chr(35):20}] {doing:30}", end="", file=sys.stderr, flush=True)
    elif share // 10 > shown or doing[0] == "u":
        shown = share // 10
        print(f"{name}: {doing}", file=sys.stderr, flush=True)
print(file=sys.stderr) if sys.stderr.isatty() else None
if any(line.startswith("ERROR") for line in lines):
    print("".join(lines[-30:]), file=sys.stderr)
' "$1" "$2"
}

# Installs one file of requirements/. --no-deps: it already contains every dependency.
install() {
    local file=$locks/$1.txt
    local options=(--require-hashes --no-deps)
    if [[ -n $index ]]; then
        # Without PyTorch, which has come from its index, and what only its CUDA build needs.
        file=$venv/$1.txt
        awk '/^[a-z]/ { keep = !/^(torch|torchvision|triton|nvidia-|cuda-)/ } /^#/ || keep' "$locks/$1.txt" >"$file"
    fi
    local total
    total=$(grep -c '^[a-z]' "$file") || return 0
    "$venv/bin/python" -m pip install "${options[@]}" -r "$file" 2>&1 | show_progress "requirements/$1.txt" "$total"
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

parts=(run)
[[ ! -e /dev/nvidiactl ]] || parts+=(gpu)
[[ ${1:-} != test ]] || parts+=(test)

# The state file names the parts that are whole. It is written last, so an incomplete environment is created again, as is
# one whose interpreter is gone.
whole=$(cat "$state" 2>/dev/null) || true
if [[ $whole != "complete $key"* ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    # Do not delete a folder that this script did not create.
    if [[ ! -e $state && -n $(ls -A "$venv" 2>/dev/null) ]]; then
        fail "$venv exists and is not an environment of slab_det: choose another SLAB_DET_VENV."
    fi
    echo "Setting up $venv, in a few minutes ..."
    "$python" -m venv --clear "$venv"
    echo building >"$state"
    if [[ -n $index ]]; then
        # The lock has a version for each range of Python versions: pip takes the one that its marker allows.
        grep -E '^(torch|torchvision)==' "$locks/run.txt" | sed 's/ *\\$//' >"$venv/torch.txt"
        "$venv/bin/python" -m pip install --quiet --index-url "$index" -r "$venv/torch.txt"
    fi
    whole="complete $key"
fi
for part in "${parts[@]}"; do
    if [[ " $whole " != *" $part "* ]]; then
        echo building >"$state"
        install "$part" || fail "pip cannot install the versions of requirements/$part.txt, see above. If a hash does" \
            'not match, the package differs from the tested one: find out why.'
        whole+=" $part"
    fi
done
echo "$whole" >"$state"
echo "$venv" >&3
