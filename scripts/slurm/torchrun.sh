# Sourced by the job scripts: one torchrun agent per node, meeting on the first, one process per GPU.
#   launch train STAGE ARGUMENT...
# PARTITION=1 (GRPO): the GPUs of every node are shared out to actors, rollout engines and executors (placement.*).
# A run goes on from its newest checkpoint whenever it is started again: after preemption or a node's failure (Slurm
# requeues the job), and before the time limit (the job requeues itself at the USR1 that --signal asks for).

launch() {
    cd "$SLURM_SUBMIT_DIR"  # the repository: submit from there
    export PATH="$PWD/.venv/bin:$PATH"
    # Compute nodes have no network: models have to be in the cache already, on a file system that all nodes share.
    export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false
    # Minutes that a collective may wait (GRPO: for the slowest rank's rollouts, and for the bank) before the run ends.
    export MEMCOMPILER_DIST_TIMEOUT="${MEMCOMPILER_DIST_TIMEOUT:-60}"
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

    local first port agents
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${first%%$'\n'*}  # no `| head`: scontrol would die of the closed pipe, and the job with it
    [[ -n "$first" ]] || { echo "scontrol names no host of $SLURM_JOB_NODELIST" >&2; return 1; }
    port=$((20000 + SLURM_JOB_ID % 10000))
    trap 'echo "time is nearly up: requeued" >&2; scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1
    local meet=(
        --nnodes="$SLURM_NNODES" --max_restarts=0 --rdzv_backend=c10d --rdzv_endpoint="$first:$port"
        --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    )
    local start=(torchrun --log-dir=/dev/null "${meet[@]}" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" -m memcompiler "$@")
    if [[ -n "${PARTITION:-}" ]]; then
        start=(memcompiler launch grpo --torchrun "${meet[*]}" "${@:3}")
    fi
    srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
        "${start[@]}" --on-exists resume &
    agents=$!
    wait "$agents"
}
