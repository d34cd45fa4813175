#!/usr/bin/env bash
# What a machine with CUDA does with this code, in 25 minutes at most and without a download: parity with the CPU, steps
# of SFT and GRPO at the paper's shapes with random weights, decoding, several GPUs, vLLM (docs/gpu.md).
#
#   bash scripts/gpu_check.sh                      # all parts; started again, it goes on with those that are missing
#   bash scripts/gpu_check.sh --part parity        # one part; with --again also where it is recorded
#   bash scripts/gpu_check.sh --size tiny          # a look at whether all parts run, in a few minutes
#
# PYTHON is the interpreter (default: .venv/bin/python, else python3), OUT the folder (default: runs/gpu-check) that gets
# gpu_check.json and gpu_check.md.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
"$python" - <<'PY'
from importlib.util import find_spec
import sys

# What the parts import. trl, deepspeed, datasets, lancedb, openai and vllm are not asked for.
needed = ("torch transformers peft accelerate safetensors numpy PIL jinja2 pydantic omegaconf typer rich httpx tenacity "
          "huggingface_hub tokenizers").split()
missing = [name for name in needed if find_spec(name) is None]
if missing:
    sys.exit(f"missing: {', '.join(missing)}. Install them (PIL is the package pillow), or run `make sync` first.")
PY

export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "$python" -m benchmarks.gpu --out "${OUT:-runs/gpu-check}" "$@"
