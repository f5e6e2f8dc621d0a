#!/usr/bin/env bash
# dist_train.sh CONFIG GPUS [arguments of train.py]
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR and PORT.
set -euo pipefail
config=${1:?usage: dist_train.sh CONFIG GPUS [arguments of train.py]}
gpus=${2:?usage: dist_train.sh CONFIG GPUS [arguments of train.py]}
exec torchrun \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "${@:3}"
