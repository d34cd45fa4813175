#!/usr/bin/env bash
# Train and evaluate SmolLM2-135M-Instruct as compiler for the zoo's frozen executor on ALFWorld games. Each command
# resumes an interrupted run.
#
#   export ALFWORLD_DATA=...                              # folder of json_2.1.1 from alfworld-download
#   bash experiments/alfworld_smollm2/run.sh train        # 300 train games of the expert; SFT
#   bash experiments/alfworld_smollm2/run.sh grpo
#   bash experiments/alfworld_smollm2/run.sh eval         # valid_seen, every delivery
#
# MODEL: Hugging Face name or folder (default: HuggingFaceTB/SmolLM2-135M-Instruct). OUT: run folder. `eval` uses the
# checkpoint of GRPO if it exists, else that of SFT. SMALL=1: a subset for two CPU cores, about two hours (60 SFT steps,
# one GRPO update, 16 games of 15 steps).
set -euo pipefail
cd "$(dirname "$0")/../.."

model=(compiler.model="${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}")
out=${OUT:-runs/alfworld-smollm2}
run() { .venv/bin/python -m memcompiler "$@"; }
sft=() grpo=() eval=()
if [[ ${SMALL:-0} == 1 ]]; then
  sft=(max_steps=60 batch_size=12 micro_batch_size=6 optimizer.lr=1.0e-3 optimizer.projector_lr=3.0e-3 save_every=10)
  grpo=(updates=1 tasks=2 group_size=4 max_steps=8 micro_batch_size=4)
  eval=(limit=16 max_steps=15 "step_budgets=[15]")
fi

case ${1:-} in
  train)
    run collect -c collect/alfworld-smollm2 --out "$out/collect"
    run train sft -c sft/alfworld-smollm2 "${model[@]}" rows="$out/collect/rows" "${sft[@]}" --out "$out/sft"
    ;;
  grpo)
    run train grpo -c grpo/alfworld-smollm2 "${model[@]}" compiler.checkpoint="$out/sft" "${grpo[@]}" --out "$out/grpo"
    ;;
  eval)
    trained=$out/grpo
    [[ -d $trained ]] || trained=$out/sft
    run eval -c eval/alfworld-smollm2 "${model[@]}" compiler.checkpoint="$trained" "${eval[@]}" --on-exists resume \
      --out "$out/eval"
    run report "$out/eval"
    ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
