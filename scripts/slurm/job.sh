# Sourced by the job scripts: what a job of ours is, and one torchrun agent per node.
#   prepare                        the repository, its environment, the first node; the job requeues itself
#   by_torchrun train STAGE ARGUMENT...    agents that meet on the first node, one process per GPU
#   in_background COMMAND...       waits for a command, and hears signals meanwhile
# A run goes on from its newest checkpoint whenever it is started again: after preemption or a node's failure (Slurm
# requeues the job), and before the time limit (the job requeues itself at the USR1 that --signal asks for).

prepare() {
    cd "$SLURM_SUBMIT_DIR"  # the repository: submit from there
    export PATH="$PWD/.venv/bin:$PATH"
    # Compute nodes have no network: models have to be in the cache already, on a file system that all nodes share.
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false
    # Minutes that a collective may wait (GRPO: for the slowest rank's rollouts, and for the bank) before the run ends.
    export MEMCOMPILER_DIST_TIMEOUT="${MEMCOMPILER_DIST_TIMEOUT:-60}"
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${first%%$'\n'*}  # no `| head`: scontrol would die of the closed pipe, and the job with it
    [[ -n "$first" ]] || { echo "scontrol names no host of $SLURM_JOB_NODELIST" >&2; return 1; }
    port=$((20000 + SLURM_JOB_ID % 10000))
    trap 'echo "time is nearly up: requeued" >&2; scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1
}

in_background() {
    "$@" &
    wait "$!"
}

by_torchrun() {
    prepare
    local meet=(
        --nnodes="$SLURM_NNODES" --max_restarts=0 --rdzv_backend=c10d --rdzv_endpoint="$first:$port"
        --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    )
    in_background srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
        torchrun --log-dir=/dev/null "${meet[@]}" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" -m memcompiler "$@" \
        --on-exists resume
}
