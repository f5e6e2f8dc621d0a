#!/usr/bin/env bash
# dist_train.sh CONFIG PROCESSES [arguments of train.py]: one process per GPU, or CPU processes without a GPU.
# For several nodes, run it on each node with NNODES, NODE_RANK, MASTER_ADDR and, if 29500 is taken, PORT.
set -euo pipefail
usage='usage: dist_train.sh CONFIG PROCESSES [arguments of train.py]'
config=${1:?$usage}
processes=${2:?$usage}
exec "$(dirname "$0")/dist_run.sh" "$processes" train.py "$config" "${@:3}"
