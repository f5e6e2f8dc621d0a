#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR and PORT.
set -euo pipefail
usage='usage: dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]'
config=${1:?$usage}
checkpoint=${2:?$usage}
gpus=${3:?$usage}
exec torchrun \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "$0")/test.py" "$config" "$checkpoint" --launcher pytorch "${@:4}"
