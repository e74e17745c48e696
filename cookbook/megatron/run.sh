#!/usr/bin/env bash
# Starts a script of this folder on all devices of this machine, or on as many ranks as are asked for:
#   run.sh tp.py [RANKS]
# On a CPU the ranks are processes that share its cores.
set -euo pipefail
script=${1:?usage: run.sh SCRIPT [RANKS]}
if [ $# -ge 2 ]; then
    ranks=$2
else
    ranks=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$(dirname "$0")/$script"
