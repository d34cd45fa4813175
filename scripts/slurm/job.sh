# Functions for the job scripts:
#   prepare                                enter the repository, set the environment, find the first node, trap USR1
#   by_torchrun train STAGE ARGUMENT...    start one torchrun agent per node, with one process per GPU
#   in_background COMMAND...               wait for a command without blocking signals
# A restarted run resumes from its newest checkpoint: after preemption or a node's failure (Slurm requeues the job), and
# before the time limit (the job requeues itself on the USR1 of --signal).

prepare() {
    cd "$SLURM_SUBMIT_DIR"  # submit from the repository
    export PATH="$PWD/.venv/bin:$PATH"
    # Compute nodes have no network: models must be in a cache that all nodes share.
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false
    # Time limit of a collective in minutes (GRPO waits for the slowest rank's rollouts, and for the bank).
    export MEMCOMPILER_DIST_TIMEOUT="${MEMCOMPILER_DIST_TIMEOUT:-60}"
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${first%%$'\n'*}  # not `| head`: the closed pipe would kill scontrol and the job
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
