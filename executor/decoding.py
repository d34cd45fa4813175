"""Decoding of one answer token by token: held to the listed commands, or free.

Held decoding (`executor.mode=constrained`) follows the tree of the commands' token ids, each with its end of turn.
At each node it takes the likeliest of the tokens that continue a command; of equally likely ones, the lowest id. At a
temperature it draws one of them instead. Where only one token continues, it is taken without asking the model, so an
answer costs one pass per branch. Every engine takes the same steps; they differ in how the model is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator


class CommandWalk:
    """A path through the tree of commands.

    Args:
        commands: token ids of each command with its end of turn.
        generator: draws tokens; None: the likeliest is taken.

    Attributes:
        logprob: log-probability of the tokens drawn so far; None where none are drawn.
    """

    def __init__(self, commands: Sequence[tuple[int, ...]], generator: Generator | None = None) -> None:
        self.generator, self.logprob = generator, None if generator is None else 0.0
        self.commands = list(dict.fromkeys(commands))
        self._open = self.commands  # that begin with the path
        self.path: tuple[int, ...] = ()
        self._skip_forced()

    @property
    def done(self) -> bool:
        return len(self._open) == 1

    @property
    def allowed(self) -> tuple[int, ...]:
        """Return the tokens that continue a command, in ascending order."""
        return tuple(sorted({ids[len(self.path)] for ids in self._open}))

    def take(self, token: int) -> None:
        """Append a token, then the next ones while only one is allowed. Raises: ValueError, if it is not allowed."""
        at = len(self.path)
        self._open = [ids for ids in self._open if ids[at] == token]
        if not self._open:
            raise ValueError(f"token {token} continues no listed command: the engine ignores what is allowed")
        self._skip_forced()

    def _skip_forced(self) -> None:
        """Extend the path to the next branch, or to the end of the only command that is left."""
        shortest, longest = min(self._open), max(self._open)  # all others are between these two
        pairs = enumerate(zip(shortest, longest, strict=False))
        self.path = shortest[: next((i for i, (a, b) in pairs if a != b), len(shortest))]


class FreeWalk:
    """An answer of any tokens, up to the end of turn or `most` tokens."""

    allowed: tuple[int, ...] = ()  # any
    logprob: float | None = None

    def __init__(self, end: int, most: int) -> None:
        self.path: tuple[int, ...] = ()
        self.end, self.most, self.done = end, most, False

    def take(self, token: int) -> None:
        """Append a token."""
        self.path = (*self.path, token)
        self.done = token == self.end or len(self.path) == self.most


Walk = CommandWalk | FreeWalk


def branches(commands: Sequence[tuple[int, ...]], chosen: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """List where the chosen command could have continued as another one: its token's index, and the allowed tokens."""
    walk, found = CommandWalk(commands), list[tuple[int, tuple[int, ...]]]()
    while not walk.done:
        found.append((len(walk.path), walk.allowed))
        walk.take(chosen[len(walk.path)])
    return found


def follow(walks: Sequence[Walk], choose: Callable[[list[int]], Sequence[int]]) -> None:
    """Let `choose(rows)` return the next token of each unfinished walk, until all have ended."""
    while rows := [i for i, walk in enumerate(walks) if not walk.done]:
        for i, token in zip(rows, choose(rows), strict=True):
            walks[i].take(token)
