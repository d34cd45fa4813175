"""A game: one task under one delivery, played step by step, in which a visitor may change memory, emission and command,
branch and go back.

A line is a sequence of moves; a move holds what was decided at a step. A line is always played by the agent loop
(`agent.episode.EpisodeRunner`): decided parts are handed to the loop, the missing ones are computed by compiler and
executor. So Brief State, history, memory sessions and prompts are those of an evaluation. Going back never asks a model
again. The environment is stepped only forward; for another line it is reset, and the line's commands are repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent.batching import Unbatched
from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeRunner, EpisodeSpec, Roles
from agent.records import Episode
from compiler.language import Emission, parse
from compiler.records import Compilation, CompileRequest
from envs.base import Environment, Observation, Transition
from executor.prompt import ExecutorRequest
from executor.records import Action, Executor, Grounding, ground
from memory.protocol import FixedSession, Recall, Record, Session
from play.insight import Probabilities, as_extra, command_probabilities, compile_as_written, soft_tokens
from runtime.errors import EnvironmentFailure, EpisodeFailure

MAX_LINES = 32  # of a game
COMPILER, EXECUTOR, MEMORY = "compiler", "executor", "memory"  # seats of the visitor


class PlayError(ValueError):
    """A request that cannot be served. The message is for the visitor."""


@dataclass(frozen=True)
class Move:
    """What is decided at a step. None: not decided yet.

    Attributes:
        memory: edits of recalled entries from this step on: id in memory -> new text, None to leave the entry out.
        emission: written by the visitor.
        by: the visitor's seats at this step.
    """

    memory: Mapping[str, str | None] = field(default_factory=dict)
    emission: Emission | None = None
    compilation: Compilation | None = None
    action: Action | None = None
    probabilities: Probabilities | None = None
    by: tuple[str, ...] = ()


@dataclass
class Line:
    """One way to play a task: its moves, and how the environment answered all but the last one."""

    id: int
    first: Observation
    parent: int | None = None
    fork: int = 0  # the step at which it leaves its parent
    moves: list[Move] = field(default_factory=lambda: [Move()])
    answers: list[Transition] = field(default_factory=list)
    episode: Episode | None = None  # as the loop recorded it

    @property
    def over(self) -> bool:
        """Return whether the episode has ended."""
        return bool(self.answers) and (self.answers[-1].success or self.answers[-1].done)

    @property
    def commands(self) -> list[str]:
        """Return the commands that were taken."""
        return [move.action.action for move in self.moves[: len(self.answers)] if move.action]

    def observed(self, t: int) -> Observation:
        """Return the observation at step t."""
        return self.first if t == 0 else self.answers[t - 1].observation

    def own_steps(self) -> dict[int, tuple[str, ...]]:
        """Return the visitor's seats by step, for taken steps since the fork."""
        return {t: m.by for t, m in enumerate(self.moves[: len(self.answers)]) if m.by and t >= self.fork}


class Game:
    """A task under a delivery. Calls are not thread-safe: the server makes one at a time.

    Args:
        spec: the task with its recalled entries.
        lease: creates the environment.
        max_steps: after which a line is over.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        *,
        delivery: Delivery,
        executor: Executor,
        lease: Callable[[], Environment],
        max_steps: int,
        seed: int = 0,
    ) -> None:
        self.spec, self.delivery, self.executor = spec, delivery, executor
        self.limits = EpisodeLimits(max_steps, seed)
        self.env = lease()
        self._taken: list[str] | None = None  # commands since the environment's reset; None: not reset
        try:
            self.lines = [Line(0, self._reset())]
        except Exception:
            self.env.close()
            raise

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    # -- what the visitor does -----------------------------------------------------------------------------------------

    def start(self, recorded: Sequence[Move] = (), expected: Sequence[str] = ()) -> Line:
        """Take the moves of a recorded episode, and decide the step after them.

        Args:
            expected: the recorded observations at these steps and the next one.

        Raises:
            PlayError: the environment or a model failed, or the environment answers differently than recorded.
        """
        line = self.lines[0]
        for t, move in enumerate(recorded):
            self._check_recorded(line, t, expected)
            line.moves[t] = move
            self._take(line)
            if line.over:
                break
            line.moves.append(Move())
        self._check_recorded(line, len(line.answers), expected)
        return self._played(line)

    def decide(
        self,
        number: int,
        t: int,
        *,
        memory: Mapping[str, str | None] | None = None,
        emission: Emission | None = None,
    ) -> Line:
        """Decide step t again with an edited memory or emission; before the line's end, on a new line."""
        line = self._at(number, t)
        move = line.moves[t]
        if memory is not None:
            self._check_memory(line, t, memory)
            move = Move(memory={**move.memory, **{own_id(id): text for id, text in memory.items()}}, by=(MEMORY,))
        if emission is not None:
            if self.delivery.compiler is None:
                raise PlayError(f"delivery {self.delivery.name} has no compiler: choose one that compiles")
            seats = (MEMORY, COMPILER) if MEMORY in move.by else (COMPILER,)
            move = Move(memory=move.memory, emission=emission, by=seats)
        line.moves[t] = move
        return self._played(line)

    def step(self, number: int, t: int, command: str | None = None) -> Line:
        """Take the executor's command at step t, or the visitor's, and decide the next step."""
        line = self._at(number, t)
        if command is not None:
            action = Action(*ground(command, line.observed(t).admissible), text=command)
            move = line.moves[t]
            line.moves[t] = replace(move, action=action, by=tuple(dict.fromkeys((*move.by, EXECUTOR))))
        self._take(line)
        if not line.over:
            line.moves.append(Move())
        return self._played(line)

    def line(self, number: int) -> Line:
        """Return a line. Raises: PlayError, if there is none."""
        if not 0 <= number < len(self.lines):
            raise PlayError(f"there is no line {number}")
        return self.lines[number]

    def extras(self, line: Line) -> dict[int, dict[str, Any]]:
        """Return what the page shows beside the record, by step."""
        return {
            t: as_extra(move.probabilities, soft_tokens(self.executor, move.compilation)) | {"by": list(move.by)}
            for t, move in enumerate(line.moves)
        }

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _at(self, number: int, t: int) -> Line:
        """Return the line to change at step t: a new one if the line has gone on since."""
        line = self.line(number)
        if not 0 <= t < len(line.moves):
            raise PlayError(f"line {number} has no step {t}")
        if t == len(line.answers):
            return line
        if len(self.lines) >= MAX_LINES:
            raise PlayError(f"a game holds {MAX_LINES} lines at most: start it again")
        branch = Line(len(self.lines), line.first, line.id, t, list(line.moves[: t + 1]), list(line.answers[:t]))
        self.lines.append(branch)
        return branch

    def _check_memory(self, line: Line, t: int, edits: Mapping[str, str | None]) -> None:
        if self.delivery.kind == "none":
            raise PlayError("delivery none reads no memory")
        if self.delivery.kind == "static" and t > 0:
            raise PlayError(f"delivery {self.delivery.name} reads the memory of the first step: edit it there")
        episode = line.episode
        if episode is None or t >= len(episode.steps):
            raise PlayError(f"step {t} is not decided yet")
        later = episode.steps[t].memory_ids
        ids = episode.memory_ids if later is None else later
        if unknown := [id for id in edits if id not in ids]:
            raise PlayError(f"step {t} recalls no entry {unknown[0]!r}")

    def _played(self, line: Line) -> Line:
        self._play(line)
        return line

    def _play(self, line: Line) -> None:
        """Play a line by the agent loop, which computes what its last move lacks, and keep the record."""
        seats = Seats(line.moves, self.executor, self.delivery)
        last = line.moves[-1]
        if not line.over and last.compilation is None and last.emission is None:
            self._follow(line)  # a teacher reads the environment's plan
        runner = EpisodeRunner(self._spec(seats), self._roles(seats))
        try:
            runner.begin()
            for t in range(len(line.moves)):
                seats.t = t
                asyncio.run(runner.act(line.observed(t)))
                if t < len(line.answers):
                    runner.record(line.answers[t], 0.0)
        except EpisodeFailure as failure:
            runner.episode.stop_reason, runner.episode.error = failure.stop_reason, str(failure)
            raise PlayError(f"{failure.stop_reason.replace('_', ' ')}: {failure}") from failure
        finally:
            line.episode = runner.episode

    def _spec(self, seats: Seats) -> EpisodeSpec:
        opened, memory = self.spec.open_session, self.spec.memory
        fixed = lambda: FixedSession(Recall(memory))
        return replace(self.spec, open_session=lambda: EditedSession((opened or fixed)(), seats))

    def _roles(self, seats: Seats) -> Roles:
        compiler = SeatedCompiler(seats) if self.delivery.compiler is not None else None
        return Roles(
            env=self.env,
            task=self.spec.task,
            delivery=replace(self.delivery, compiler=compiler),
            executor=SeatedExecutor(seats),
            limits=self.limits,
            batcher=Unbatched(),
            index=0,
        )

    # -- the environment -----------------------------------------------------------------------------------------------

    def _take(self, line: Line) -> None:
        """Execute the command of a line's last move."""
        action = line.moves[len(line.answers)].action
        if action is None:
            raise PlayError("this step is not decided yet")
        self._follow(line)
        answer = self._step(action.action)
        if len(line.moves) >= self.limits.max_steps and not (answer.success or answer.done):
            answer = replace(answer, done=True, truncated=True)
        line.answers.append(answer)

    def _follow(self, line: Line) -> None:
        """Bring the environment to the end of a line. Raises: PlayError, if it answers differently than before."""
        commands = line.commands
        begun = self._taken is not None and self._taken == commands[: len(self._taken)]
        if not begun and self._reset().text != line.first.text:
            raise self._other_world(0)
        for t in range(len(self._taken or ()), len(commands)):
            if self._step(commands[t]).observation.text != line.answers[t].observation.text:
                raise self._other_world(t + 1)

    def _reset(self) -> Observation:
        self._taken = None
        observed = _in_environment(lambda: self.env.reset(self.spec.task))
        self._taken = []
        return observed

    def _step(self, command: str) -> Transition:
        taken, self._taken = self._taken or [], None
        answer = _in_environment(lambda: self.env.step(command))
        self._taken = [*taken, command]
        return answer

    def _check_recorded(self, line: Line, t: int, expected: Sequence[str]) -> None:
        if t < len(expected) and not line.over and line.observed(t).text != expected[t]:
            raise self._other_world(t)

    def _other_world(self, t: int) -> PlayError:
        return PlayError(
            f"{self.env.name} shows something else at step {t} than it did before, so this episode can be watched, but "
            "not played on"
        )


def _in_environment(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except EnvironmentFailure as error:
        raise PlayError(f"environment failure: {error}") from error
    except Exception as error:  # environments of other packages raise anything
        raise PlayError(f"environment failure: {type(error).__name__}: {error}") from error


# -- seats -------------------------------------------------------------------------------------------------------------


class Seats:
    """Hands the loop what is decided at step t, and asks the models for the rest."""

    def __init__(self, moves: list[Move], executor: Executor, delivery: Delivery) -> None:
        self.moves, self.executor, self.compiler, self.t = moves, executor, delivery.compiler, 0

    @property
    def move(self) -> Move:
        """Return the move of this step."""
        return self.moves[self.t]

    def note(self, **decided: Any) -> None:
        """Add to this step's move."""
        self.moves[self.t] = replace(self.move, **decided)


class SeatedCompiler:
    """The compiler of a game: what is decided, the visitor's emission, or the delivery's compiler."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats

    @property
    def batched(self) -> bool:
        """Return whether the loop may batch its calls."""
        return getattr(self._seats.compiler, "batched", True)

    @property
    def needs_expert(self) -> bool | None:
        """Return whether the loop computes the expert's plan for this step."""
        needs = getattr(self._seats.compiler, "needs_expert", None)
        move = self._seats.move
        return needs if move.compilation is None and move.emission is None else None

    def compile(self, requests: Sequence[CompileRequest], *contexts: Any) -> list[Compilation]:
        """Return the step's compilation."""
        seats, move = self._seats, self._seats.move
        assert seats.compiler is not None  # else the delivery has none
        if move.compilation is not None:
            return [move.compilation]
        if move.emission is not None:
            found = compile_as_written(seats.compiler, requests[0], move.emission)
        else:
            [found] = seats.compiler.compile(requests, *contexts)  # type: ignore[call-arg]
        if isinstance(found, Exception):
            raise found
        seats.note(compilation=found)
        return [found]


class SeatedExecutor:
    """The executor of a game: what is decided, or the frozen executor."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        executor = seats.executor
        self.accepts_soft, self.sees_images, self.reads = executor.accepts_soft, executor.sees_images, executor.reads
        self.batched = getattr(executor, "batched", True)

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        """Return the step's action."""
        seats = self._seats
        if seats.move.action is None:
            [action] = seats.executor.act(requests)
            if isinstance(action, Exception):
                raise action
            seats.note(action=action)
        if seats.move.probabilities is None and seats.t == len(seats.moves) - 1:
            seats.note(probabilities=command_probabilities(seats.executor, requests[0]))
        assert seats.move.action is not None
        return [seats.move.action]


class EditedSession:
    """A memory session whose entries the visitor may edit. An edit holds from its step on."""

    def __init__(self, session: Session, seats: Seats) -> None:
        self._session, self._seats = session, seats

    def recall(self, observation: str) -> Recall:
        """Recall entries, as edited so far. An edited entry has an id of its own."""
        recalled, entries = self._session.recall(observation), []
        for entry in recalled.entries:
            id, text = entry.id, entry.text
            for t, move in enumerate(self._seats.moves[: self._seats.t + 1]):
                if entry.id in move.memory:
                    text, id = move.memory[entry.id], f"{entry.id} (edited at step {t})"
            if text is not None:
                entries.append(entry if id == entry.id else replace(entry, id=id, text=text))
        return Recall(tuple(entries), generated=True)

    def observe(self, record: Record) -> None:
        """Pass a finished step on."""
        self._session.observe(record)


def own_id(id: str) -> str:
    """Return the id in memory of an entry that may be edited."""
    return re.sub(r" \(edited at step \d+\)$", "", id)


def recorded_moves(episode: Episode, t: int) -> list[Move]:
    """Return the moves of the first t steps of a recorded episode. Raises: PlayError, for a step that broke."""
    moves = []
    for step in episode.steps[:t]:
        if not step.grounding:
            raise PlayError(f"step {step.t} of the record has no command: play on from an earlier one")
        compilation = None
        if step.emission_kind:
            parsed = parse(step.emission_text)
            compilation = Compilation(step.emission_text, parsed.emission, parsed.error, step.compiler_prompt_ids)
        action = Action(step.action, Grounding(step.grounding), text=step.executor_text)
        moves.append(Move(compilation=compilation, action=action))
    return moves
