#!/usr/bin/env bash
# Real weights on real games: SmolLM2-135M-Instruct compiles for the zoo's frozen executor on ALFWorld. Three commands,
# each of which goes on where it was stopped (docs/results.md says what has been measured, and on what).
#
#   export ALFWORLD_DATA=...               # where alfworld-download put json_2.1.1
#   bash scripts/alfworld_smollm2.sh train    # the expert plays 300 train games; SFT
#   bash scripts/alfworld_smollm2.sh grpo
#   bash scripts/alfworld_smollm2.sh eval     # valid_seen, every delivery
#
# MODEL is a Hugging Face name or folder (default: HuggingFaceTB/SmolLM2-135M-Instruct), OUT the run folder. `eval` takes
# the checkpoint of GRPO where there is one, else that of SFT.
# SMALL=1 is a subset for two CPU cores, some two hours: 60 steps of SFT, one GRPO update, 16 games of 15 steps.
set -euo pipefail
cd "$(dirname "$0")/.."

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
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
