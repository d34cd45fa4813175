#!/usr/bin/env bash
# Real weights on real games: SmolLM2-135M-Instruct as compiler and as frozen executor on ALFWorld. Three commands, each
# of which goes on where it was stopped; on one H200-class GPU meant to take 25 minutes together (docs/results.md says
# what has been measured, and on what).
#
#   export ALFWORLD_DATA=...               # where alfworld-download put json_2.1.1
#   bash scripts/alfworld_smollm2.sh train    # the expert plays 300 train games; SFT
#   bash scripts/alfworld_smollm2.sh grpo
#   bash scripts/alfworld_smollm2.sh eval     # valid_seen, every delivery
#
# MODEL is a Hugging Face name or folder (default: HuggingFaceTB/SmolLM2-135M-Instruct), OUT the run folder.
# SMALL=1 is a subset for two CPU cores, some 40 minutes: 180 games, 48 steps, one GRPO update, 6 games.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
out=${OUT:-runs/alfworld-smollm2}
run() { .venv/bin/python -m memcompiler "$@"; }
models=("compiler.model=$model" "executor.model=$model")
collect=() sft=() grpo=() eval=()
if [[ ${SMALL:-0} == 1 ]]; then
  cpu=(compiler.dtype=float32 executor.dtype=float32)
  collect=(limit=180 memory.k=1)
  sft=("${cpu[@]}" max_steps=48 batch_size=12 micro_batch_size=6 optimizer.lr=1.0e-3 optimizer.projector_lr=1.0e-3 save_every=6)
  grpo=("${cpu[@]}" limit=180 memory.k=1 updates=1 tasks=2 group_size=4 max_steps=8 micro_batch_size=4)
  eval=("${cpu[@]}" limit=6 memory.k=1 memory.experience_limit=60 max_steps=15
    "deliveries=[none, static, compiled_text, compiled, expert_compiler]")
fi

case ${1:-} in
  train)
    run collect -c collect/alfworld-smollm2 "${collect[@]}" --out "$out/collect"
    run train sft -c sft/alfworld-smollm2 "${models[@]}" rows="$out/collect/rows" "${sft[@]}" --out "$out/sft"
    ;;
  grpo)
    run train grpo -c grpo/alfworld-smollm2 "${models[@]}" compiler.checkpoint="$out/sft" "${grpo[@]}" --out "$out/grpo"
    ;;
  eval)
    run eval -c eval/alfworld-smollm2 "${models[@]}" compiler.checkpoint="$out/grpo" "${eval[@]}" --on-exists resume \
      --out "$out/eval"
    run report "$out/eval"
    ;;
  *)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
