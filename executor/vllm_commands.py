"""Holds answers to the listed commands inside vLLM's engine, so that one request decodes a whole command.

The engine loads the class by its name. It is written for the model runner that vLLM has on CPU; on GPU, where vLLM may
choose another one, `executor.vllm` asks for one token at each branch of the commands instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from executor.vllm import COMMANDS


class HeldToCommands(AdapterLogitsProcessor):
    """Lets a request with `COMMANDS` decode only tokens that continue one of its commands."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        commands = (params.extra_args or {}).get(COMMANDS)
        return None if commands is None else partial(held_to, [tuple(ids) for ids in commands])


def held_to(commands: Sequence[tuple[int, ...]], written: Sequence[int], logits: Tensor) -> Tensor:
    """Set the logits (V,) of all tokens to -inf that continue no command behind what is written."""
    at, begun = len(written), tuple(written)
    allowed = sorted({ids[at] for ids in commands if len(ids) > at and ids[:at] == begun})
    return torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(allowed, dtype=torch.long), logits[allowed])
