#!/usr/bin/env bash
# slurm_train.sh CONFIG [arguments of train.py]: an example; change it to what your cluster wants.
# One task per GPU; PARTITION, JOB_NAME, GPUS, GPUS_PER_NODE, CPUS_PER_TASK and SRUN_ARGS are taken from the environment.
set -euo pipefail
config=${1:?usage: slurm_train.sh CONFIG [arguments of train.py]}
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
arguments=(--job-name="${JOB_NAME:-slab_det}" --ntasks="$gpus" --ntasks-per-node="$gpus_per_node"
           --gres="gpu:$gpus_per_node" --cpus-per-task="${CPUS_PER_TASK:-5}")
if [[ -n ${PARTITION:-} ]]; then
    arguments+=(--partition="$PARTITION")
fi
# When one task fails the others must not wait for it. SRUN_ARGS is several words.
# shellcheck disable=SC2086
exec srun "${arguments[@]}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$(cd "$(dirname "$0")" && pwd)/train.py" "$config" "${@:2}" --launcher slurm
