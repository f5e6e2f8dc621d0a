#!/usr/bin/env bash
# Writes requirements/lock.txt, the exact versions and hashes that tools/venv.sh installs, for Python 3.10 to 3.13.
#
#   tools/lock.sh            after a change in pyproject.toml: keeps every version that is still allowed
#   tools/lock.sh --upgrade  takes the newest versions; other options of `uv pip compile` work too
#
# Afterwards run `make test`, and audit with: pip-audit --requirement requirements/lock.txt --require-hashes --disable-pip
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet uv
# uv resolves for all these Python versions without installing them.
UV_PYTHON_DOWNLOADS=never "$work/bin/uv" pip compile pyproject.toml --extra test --universal --python-version 3.10 \
    --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command tools/lock.sh \
    --output-file requirements/lock.txt "$@"
