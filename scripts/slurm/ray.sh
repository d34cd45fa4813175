#!/bin/bash
#SBATCH --job-name=memcompiler-ray
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#
# Start Ray on the job's nodes and run a memcompiler command on it. From the repository, on a shared file system:
#   GRPO on one node of 8 GPUs (4 train, 3 roll out, 1 acts)
#       sbatch scripts/slurm/ray.sh train grpo -c grpo/paper cluster=ray --out runs/grpo
#   on two nodes; evaluation on four
#       sbatch --nodes=2 scripts/slurm/ray.sh train grpo -c grpo/paper cluster=ray tasks=16 --out runs/grpo
#       sbatch --nodes=4 scripts/slurm/ray.sh eval -c eval/alfworld cluster=ray ray.gpus=1 --out runs/eval --on-exists resume
# Arguments are a memcompiler command. Ray listens on all addresses of its nodes; clients need the job's random token,
# which only its processes' environment holds.

set -euo pipefail
source "$SLURM_SUBMIT_DIR/scripts/slurm/job.sh"
prepare
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_HEAD="$first:$port" RAY_HEAD_PORT="$port"

# A failing node does not end the others: the run continues without it, or from its newest checkpoint.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \
    bash "$SLURM_SUBMIT_DIR/scripts/slurm/ray_node.sh" &
nodes=$!
trap 'kill "$nodes" 2>/dev/null || true' EXIT
export RAY_ADDRESS="$RAY_HEAD"
python -m runtime.cluster "$SLURM_NNODES"  # waits for all nodes
in_background memcompiler "$@"
