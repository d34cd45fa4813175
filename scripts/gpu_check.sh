#!/usr/bin/env bash
# Check this code on a machine with CUDA within a time limit and without downloads: parity with the CPU, SFT and GRPO
# steps at the paper's shapes with random weights, decoding, a short training run, several GPUs, vLLM (docs/guides/gpu.md).
#
#   bash scripts/gpu_check.sh                      # 25 minutes; a second call runs the missing parts
#   bash scripts/gpu_check.sh --minutes 9          # the same parts in nine minutes
#   bash scripts/gpu_check.sh --part parity        # one part; --again repeats a recorded one
#   bash scripts/gpu_check.sh --size tiny          # only checks that all parts run
#
# PYTHON: interpreter (default: .venv/bin/python, else python3). OUT: folder of gpu_check.json, gpu_check.md and
# gpu_check.tgz (default: runs/gpu-check). Missing packages are installed into a temporary folder from the wheels in
# .whl/, which `make gpu-check` fetches.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
# Imports of the parts; trl, deepspeed, datasets, lancedb, openai and vllm are optional.
needed="torch transformers peft accelerate safetensors numpy PIL jinja2 pydantic omegaconf typer rich httpx tenacity
huggingface_hub tokenizers"
missing() {
  "$python" -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $needed
}

absent=$(missing)
if [[ -n $absent ]] && compgen -G ".whl/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  absent=$(missing)
fi
if [[ -n $absent ]]; then
  echo "missing: $absent. Install them (PIL is the package pillow), or run \`make gpu-check\` where there is a network." >&2
  exit 1
fi

export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
"$python" -m benchmarks.gpu --out "${OUT:-runs/gpu-check}" "$@"
