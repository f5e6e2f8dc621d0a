#!/usr/bin/env bash
# dist_run.sh PROCESSES TOOL [arguments]: runs TOOL distributed, for dist_train.sh and dist_test.sh.
set -euo pipefail
tools=$(cd "$(dirname "$0")" && pwd)
if [[ ${NNODES:-1} == 1 && -z ${PORT:-} ]]; then
    # --standalone picks a free port, so that two runs on one machine do not collide.
    rendezvous=(--standalone --local-addr=127.0.0.1)
else
    rendezvous=(--nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}"
                --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${PORT:-29500}")
fi
# Not torchrun, which may belong to another Python than $PYTHON.
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$1" \
    "$tools/$2" "${@:3}" --launcher pytorch
