#!/usr/bin/env bash
# dist_run.sh PROCESSES TOOL [arguments]: what dist_train.sh and dist_test.sh share.
set -euo pipefail
tools=$(cd "$(dirname "$0")" && pwd)
if [[ ${NNODES:-1} == 1 && -z ${PORT:-} ]]; then
    # A free port: two runs on one machine do not meet.
    rendezvous=(--standalone --local-addr=127.0.0.1)
else
    rendezvous=(--nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}"
                --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${PORT:-29500}")
fi
# As a module, not as torchrun: the python that is found is the one that runs.
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$1" \
    "$tools/$2" "${@:3}" --launcher pytorch
