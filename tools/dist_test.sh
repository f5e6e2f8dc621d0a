#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT PROCESSES [arguments of test.py]: one process per GPU, or CPU processes without a GPU.
# For several nodes, run it on each node with NNODES, NODE_RANK, MASTER_ADDR and, if 29500 is taken, PORT.
set -euo pipefail
usage='usage: dist_test.sh CONFIG CHECKPOINT PROCESSES [arguments of test.py]'
config=${1:?$usage}
checkpoint=${2:?$usage}
processes=${3:?$usage}
exec "$(dirname "$0")/dist_run.sh" "$processes" test.py "$config" "$checkpoint" "${@:4}"
