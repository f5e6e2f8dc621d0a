#!/usr/bin/env bash
# Writes requirements/*.txt, the exact versions and hashes that tools/venv.sh installs, for Python 3.10 to 3.13:
# run.txt (slab_det and its runtimes), gpu.txt (what PyTorch needs on a GPU only), test.txt (run.txt and the tests) and
# docs.txt (the site alone).
#
#   tools/lock.sh            after a change in pyproject.toml: keeps every version that is still allowed
#   tools/lock.sh --upgrade  takes the newest versions; other options of `uv pip compile` work too
#
# Afterwards run `make test`, and audit with: pip-audit --requirement requirements/test.txt --require-hashes --disable-pip
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet uv

# Two distributions of OpenCV would write the same files: imaug asks for the one without windows, mmcv for the other.
options=(--universal --python-version 3.10 --generate-hashes --no-annotate --no-emit-index-url
    --no-emit-package opencv-python-headless --custom-compile-command tools/lock.sh)
# PyTorch links the other CUDA libraries, and does not start without them: a machine without a GPU needs those too.
gpu=(triton cuda-bindings cuda-pathfinder nvidia-cusolver nvidia-cuda-cccl)

# uv resolves for all these Python versions without installing them.
compile() {
    UV_PYTHON_DOWNLOADS=never "$work/bin/uv" pip compile --quiet "${options[@]}" "$@"
}
compile pyproject.toml --extra test "${@}" --output-file requirements/test.txt
compile pyproject.toml --extra openvino --extra serve --constraint requirements/test.txt "${gpu[@]/#/--no-emit-package=}" \
    --output-file requirements/run.txt
sed -n "s/^docs = \['\(.*\)'\]$/\1/p" pyproject.toml |
    compile - --constraint requirements/test.txt --output-file requirements/docs.txt
# The entries of these packages: a line with a version, and its indented hashes.
awk -v names="${gpu[*]}" '
    BEGIN { split(names, list); for (i in list) wanted[list[i]] }
    /^[a-z]/ { split($0, parts, "=="); keep = parts[1] in wanted }
    /^#/ || keep' requirements/test.txt >requirements/gpu.txt
