"""A closed model as executor, over any OpenAI-compatible endpoint: reads text only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from executor.prompt import ExecutorRequest, Rules, executor_chat, rules_of
from executor.records import PAPER_VIEW, Action, ExecutorView, ground
from lm.endpoint import Endpoint, user_message
from lm.prompt import ChatTurn
from lm.responses import Message
from memory.trajectory import png_bytes


class ApiExecutor:
    """An `Executor` that answers in free text, which is grounded. It reads the prompt of every executor, without soft
    tokens. Thread-safe.

    Args:
        role: name of its costs in the endpoint's ledger.
    """

    accepts_soft, concurrent = False, True

    def __init__(
        self,
        endpoint: Endpoint,
        instructions: Rules = "",
        max_new_tokens: int = 64,
        role: str = "executor",
        reads: ExecutorView = PAPER_VIEW,
    ) -> None:
        self.endpoint, self.instructions = endpoint, instructions
        self.max_new_tokens, self.role, self.reads = max_new_tokens, role, reads
        self.sees_images = endpoint.config.images

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Any]:
        """Return one action per request, in order, or the exception of a failed one, which ends that episode only."""
        return self.endpoint.run([self._act(request) for request in requests])

    def hash(self) -> str:
        """Return model and endpoint, since the weights are not accessible."""
        return f"{self.endpoint.config.model} at {self.endpoint.config.base_url}"

    async def _act(self, request: ExecutorRequest) -> Action:
        answer = await self.endpoint.ask(self.messages(request), self.role, self.max_new_tokens)
        grounded = ground(answer.text, request.admissible)
        return Action(*grounded, answer.text, tokens_in=answer.tokens_in, tokens_out=answer.tokens_out)

    def messages(self, request: ExecutorRequest) -> list[Message]:
        """Write the chat messages of a request."""
        image = request.image if self.sees_images else None
        past = tuple(replace(turn, compiled=replace(turn.compiled, soft=None)) for turn in request.past)
        plain = replace(request, image=image, past=past, delivered=replace(request.delivered, soft=None))
        return [
            _message(turn)
            for turn in executor_chat(plain, *rules_of(self.instructions, request.environment, self.reads.commands))
        ]


def _message(turn: ChatTurn) -> Message:
    """Convert a turn to a message of the endpoint's protocol."""
    if turn.role == "user":
        return user_message(*(part.text if part.image is None else png_bytes(part.image) for part in turn.parts))
    return {"role": turn.role, "content": "".join(part.text for part in turn.parts)}
