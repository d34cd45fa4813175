"""A checkpoint to the Hugging Face hub, with a model card. The token comes from the environment, as for any HF tool."""

from __future__ import annotations

import json
from pathlib import Path

from compiler.checkpoint import find

IGNORED = ["optimizer.safetensors"]  # only resuming needs it


def model_card(checkpoint: Path) -> str:
    """Say what the folder holds and how it was made, from the checkpoint's own records."""
    state = json.loads((checkpoint / "state.json").read_text())
    projector = json.loads((checkpoint / "projector.json").read_text())
    facts = {k: v for k, v in state.items() if isinstance(v, int | float | str)}
    rows = "\n".join(f"| {name} | {value} |" for name, value in (facts | projector).items())
    return (
        "---\nlibrary_name: peft\ntags: [memcompiler, embodied-agents, memory]\n---\n\n"
        "# MemCompiler checkpoint\n\nA memory compiler: LoRA adapter (`adapter/`) and soft-token projector "
        "(`projector.safetensors`). The executor is not in here; it stayed frozen, and its hash is below.\n\n"
        f"| fact | value |\n|---|---|\n{rows}\n"
    )


def push(run: Path, repo: str, private: bool = True) -> str:
    """Upload the newest checkpoint of a run (or a checkpoint folder); returns its address.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    from huggingface_hub import HfApi

    checkpoint = find(run)
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    card = model_card(checkpoint).encode()
    api.upload_folder(repo_id=repo, folder_path=str(checkpoint), ignore_patterns=[*IGNORED, "README.md"])
    api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repo)
    return f"hub:{repo}"
