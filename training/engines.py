"""Engines beside the trainers, as actors on Ray: compilers that roll out and executors that act, and their clients.

A request brings all that it takes to answer it: by which weights (their version, their SHA-256, and where they lie),
how to draw, and the state of the random numbers. So any engine can answer it, one that has just taken a lost one's
place, too, and says the same. Random numbers are the client's: one engine draws as the trainer's own compiler would.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.records import Compilation, CompileRequest, Decoding
from configs.models import CompilerConfig, ExecutorConfig, model_path
from configs.training import Placement
from envs.spec import Told
from executor.base import TokenExecutor
from executor.build import load_executor, reads_of
from lm.backbone import input_embeddings, load_encoder
from lm.prompt import Prompt
from lm.vllm import engine_trouble
from runtime.actors import why
from runtime.cluster import ClusterError, import_ray
from soft_mem.projector import Projector

PAUSE_S = 0.2  # between two looks for an engine that is there
TURN_S = 5.0  # that one waits for answers before one looks at the clock
Tell = Callable[[Mapping[str, Any]], object]  # what is to be recorded: engines that were lost
TENSORS = ("text_logprobs", "z", "noise", "mu", "log_sigma", "soft", "latent_logprobs")  # of a compilation
Stream = int | Tensor  # random numbers: a seed, or how far they were drawn


class WeightsError(RuntimeError):
    """Something was compiled, or would have been, with other weights than were asked for."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Adapter and projector. `files`: where their files lie, by their paths in a checkpoint, as `bytes`."""

    version: int
    sha256: str
    files: Any


def nobody(row: Mapping[str, Any]) -> None:
    """Be told, and record nothing. (Ray puts a `print` of its own in the place of Python's, which cannot be sent.)"""


@dataclass(frozen=True, slots=True)
class Engines:
    """What trainers have beside them: actors (`runtime.actors.Holder`) by role, and the rules when one is lost."""

    compilers: Sequence[Any]
    executors: Sequence[Any]
    rules: Placement
    tell: Tell = nobody


# -- in an engine's process --------------------------------------------------------------------------------------------


class CompilerEngine:
    """A compiler that rolls out, by whichever weights a request names. `fetch`: reads `Weights.files`."""

    def __init__(
        self, config: CompilerConfig, seed: int, told: str, fetch: Callable[[Any], Mapping[str, bytes]] | None = None
    ) -> None:
        self._vllm = config.engine == "vllm"
        make = load_served_compiler(config, seed, told) if self._vllm else load_compiler(config, None, seed, told)
        self._compiler: Any = make
        self._fetch = fetch or import_ray().get
        self._has: tuple[int, str] | None = None  # version and SHA-256

    @property
    def broken(self) -> str | None:
        return self._compiler.broken

    def about(self) -> dict[str, Any]:
        return {}

    def compile(
        self, requests: Sequence[CompileRequest], decoding: Decoding, stream: Stream, weights: Weights
    ) -> tuple[list[Compilation], Tensor]:
        """Compile, and say how far random numbers were drawn. Raises: WeightsError, where the weights are not those
        that were named; else as the compiler."""
        self._take(weights)
        compiler = self._compiler
        compiler.decoding = decoding
        if isinstance(stream, int):
            compiler.generator.manual_seed(stream)
        else:
            compiler.generator.set_state(stream)
        return [_sent(made) for made in compiler.compile(requests)], compiler.generator.get_state()

    def _take(self, weights: Weights) -> None:
        if self._has == (weights.version, weights.sha256):
            return
        self._has = None  # until all of it is there
        with TemporaryDirectory(prefix="memcompiler-weights-") as name:
            folder = Path(name)
            for path, data in self._fetch(weights.files).items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            if (found := _sha256(folder)) != weights.sha256:
                raise WeightsError(f"weights of version {weights.version} came as {found}, not {weights.sha256}")
            if self._vllm:
                self._compiler.load_adapter(folder, weights.version, checkpoint.load_projector(folder))
            else:
                checkpoint.load(folder, self._compiler)
                self._compiler.weight_version = weights.version
        self._has = (weights.version, weights.sha256)


class ExecutorEngine:
    """An executor that scores and generates; its clients encode and choose."""

    def __init__(self, config: ExecutorConfig, told: Told) -> None:
        made = load_executor(config, told)
        assert isinstance(made, TokenExecutor)
        self._executor, self._size = made, config.batch_size if config.engine == "hf" else sys.maxsize

    @property
    def broken(self) -> str | None:
        llm = getattr(self._executor, "llm", None)
        return None if llm is None else engine_trouble(llm, at_rest=True)

    def about(self) -> dict[str, Any]:
        return {"context": self._executor.context}

    def hash(self) -> str:
        return self._executor.hash()

    @torch.no_grad()
    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        return [_whole(score.cpu()) for score in self._batches(self._executor.candidate_logprobs, prompts, candidates)]

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], admissible: Sequence[Sequence[str] | None]
    ) -> list[tuple[list[int], int | None]]:
        return self._batches(self._executor.generate, prompts, admissible)

    def _batches(self, call: Callable[..., Sequence[Any]], prompts: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
        """Call with as many rows at a time as the executor in a trainer would have."""
        made: list[Any] = []
        for at in range(0, len(prompts), self._size):
            made += call(prompts[at : at + self._size], beside[at : at + self._size])
        return made


def _sent(made: Compilation) -> Compilation:
    """Leave out what its client has, or can encode itself, and hold nothing of the rest of the batch."""
    tensors = {name: value for name in TENSORS if (value := getattr(made, name)) is not None}
    return replace(made, request=None, prompt=None, **{name: _whole(value) for name, value in tensors.items()})


def _whole(tensor: Tensor) -> Tensor:
    """Give a tensor that has a storage of its own: a view is sent with all that it is a view of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _sha256(folder: Path) -> str:
    """Hash the tensors' files. (Settings beside them may be written in another order by another process.)"""
    digest = hashlib.sha256()
    for path in (folder / "adapter" / "adapter_model.safetensors", folder / "projector.safetensors"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# -- clients -----------------------------------------------------------------------------------------------------------


class Pool:
    """Engines of a role as one trainer sees them. One that is lost comes back in a while, for Ray starts it anew; what
    it was asked is given to one that is there.

    Args:
        ray: the module.
        role: what they are called.
        rules: how often a request is given again, and when an engine is lost that says nothing.
        first: which of them this trainer prefers for the first part of its requests.
    """

    def __init__(
        self, ray: Any, role: str, engines: Sequence[Any], rules: Placement, tell: Tell, first: int = 0
    ) -> None:
        self._ray, self._role, self._engines, self._rules, self._tell = ray, role, list(engines), rules, tell
        self._first = first
        self._lost: dict[int, Any] = {}  # what the ones that are lost say when they are back; None: never

    def __len__(self) -> int:
        return len(self._engines)

    def about(self) -> dict[str, Any]:
        """Ask what one of them says of itself. Raises: ClusterError, where nobody is left."""
        while True:
            engine = self._choose(0)
            try:
                return self._ray.get(self._engines[engine].about.remote())
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                self._lose(engine, why(error))

    def ask_all(self, name: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have each call answered, side by side; answers are in their order.

        Raises:
            ClusterError: whoever had a request was lost, once more than `retries`; or nobody is left.
            Exception: what an engine raised.
        """
        answers: list[Any] = [None] * len(calls)
        lost: dict[int, tuple[str, ...]] = {i: () for i in range(len(calls))}
        waiting, asked = deque(lost), dict[Any, _Asked]()
        silence = (None, f"it said nothing for {self._rules.silence_s:g} s")
        while waiting or asked:
            while waiting:
                call = waiting.popleft()
                engine = self._choose(call)
                asked[self._engines[engine].ask.remote(name, *calls[call])] = _Asked(call, engine)
            ready, others = self._ray.wait(list(asked), num_returns=1, timeout=TURN_S)
            late = self._silent({each: asked[each] for each in others})
            over = [(each, self._answer(each)) for each in ready] + [(each, silence) for each in late]
            for each, (answer, reason) in over:
                one = asked.pop(each)
                if not reason:
                    answers[one.call] = answer
                    continue
                self._lose(one.engine, reason)
                lost[one.call] += (reason,)
                if len(lost[one.call]) > self._rules.retries:
                    words = "; ".join(lost[one.call])
                    raise ClusterError(f"{len(lost[one.call])} {self._role}s were lost over a request: {words}")
                waiting.append(one.call)
        return answers

    def _answer(self, each: Any) -> tuple[Any, str]:
        """Take what an engine answers, or why it is lost. Raises: what it raised."""
        try:
            return self._ray.get(each), ""
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # its process, its node, or what it had sent is gone
            return None, why(error)

    def _choose(self, call: int) -> int:
        """Choose an engine that is there for a request, the same one as last time where it is; wait for one where none
        is."""
        due = time.monotonic() + self._rules.silence_s
        order = [(self._first + call + i) % len(self._engines) for i in range(len(self._engines))]
        while True:
            self._look_for_the_lost()
            for engine in order:
                if engine not in self._lost:
                    return engine
            if all(said is None for said in self._lost.values()) or time.monotonic() > due:
                raise ClusterError(
                    f"no {self._role} is left: each was replaced {self._rules.restarts} times (placement.restarts), or "
                    f"no node has had room for it for {self._rules.silence_s:g} s"
                )
            time.sleep(PAUSE_S)

    def _look_for_the_lost(self) -> None:
        """See which of the lost engines are back."""
        for engine, said in list(self._lost.items()):
            if said is None or not self._ray.wait([said], timeout=0)[0]:
                continue
            try:
                about = self._ray.get(said)
            except self._ray.exceptions.ActorDiedError as error:  # Ray will not start it again
                self._lost[engine] = None
                self._told(engine, "given up", why(error))
            except self._ray.exceptions.RayError:  # not yet
                self._lost[engine] = self._engines[engine].about.remote()
            else:
                del self._lost[engine]
                self._told(engine, "back", **about)

    def _silent(self, asked: Mapping[Any, _Asked]) -> list[Any]:
        """End engines that have said nothing for too long, and give what they were asked."""
        due = time.monotonic() - self._rules.silence_s
        late = [each for each, one in asked.items() if one.since < due]
        for engine in {asked[each].engine for each in late}:
            self._ray.kill(self._engines[engine], no_restart=False)
        return late

    def _lose(self, engine: int, reason: str) -> None:
        if engine not in self._lost:
            self._lost[engine] = self._engines[engine].about.remote()
            self._told(engine, "lost", reason)

    def _told(self, engine: int, event: str, reason: str = "", **facts: Any) -> None:
        said = {"role": self._role, "number": engine, "event": event, "reason": reason, "at": time.time(), **facts}
        self._tell(said)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that an engine has."""

    call: int
    engine: int
    since: float = field(default_factory=time.monotonic)


class _Streams:
    """The random numbers of each part of a batch, between its engine's answers: a `training.rollout.Seeded`."""

    def __init__(self) -> None:
        self._of: dict[int, Stream] = {}
        self._seed = 0

    def manual_seed(self, seed: int) -> None:
        self._seed = seed
        self._of.clear()

    def __getitem__(self, part: int) -> Stream:
        return self._of.get(part, self._seed + part * 2**40)  # other numbers than other trainers and updates have

    def __setitem__(self, part: int, state: Tensor) -> None:
        self._of[part] = state


class RayCompiler:
    """Engines that compile: a `training.rollout.RolloutPolicy`. Each batch is cut into as many parts as there are
    engines, whoever of them is there, so that what is drawn depends on their number alone."""

    def __init__(self, pool: Pool, put: Callable[[Any], Any]) -> None:
        self._pool, self._put = pool, put
        self.decoding, self.generator = Decoding(), _Streams()
        self._weights: Weights | None = None

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None:
        """Have all that is asked from now on be compiled with the weights in `folder`."""
        digest = _sha256(folder)
        if self._weights is None or (self._weights.version, self._weights.sha256) != (version, digest):
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
            }
            self._weights = Weights(version, digest, self._put(files))

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        """Get one compilation for each request, in their order. Raises: WeightsError, where one comes from other
        weights than were asked for; else as `Pool.ask_all`."""
        assert self._weights is not None  # `load_adapter` comes first
        parts = [(i, part) for i, part in enumerate(_parts(requests, len(self._pool))) if part]
        calls = [(part, self.decoding, self.generator[i], self._weights) for i, part in parts]
        made: list[Compilation] = []
        for (i, part), (some, state) in zip(parts, self._pool.ask_all("compile", calls), strict=True):
            self.generator[i] = state
            for request, compilation in zip(part, some, strict=True):
                if compilation.weight_version != self._weights.version:
                    raise WeightsError(
                        f"compiled with weights of version {compilation.weight_version}, not {self._weights.version}"
                    )
                compilation.request = request
            made += some
        return made


class RayExecutor(TokenExecutor):
    """Engines that act: prompts are encoded and actions drawn here, so that a request can be given again."""

    def __init__(self, config: ExecutorConfig, told: Told, pool: Pool) -> None:
        shown = told.instructions if config.instructions == "full" else ""
        self._name, self._revision, self._pool = model_path(config.model), config.revision, pool
        encoder = load_encoder(self._name, config.memory_token, config.revision, config.chat_template)
        super().__init__(
            encoder, shown, config.max_new_tokens, config.images, config.temperature, reads_of(config, told)
        )
        self.mode = config.mode
        self.context = pool.about()["context"]

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """(V, d), read from the model's files."""
        return input_embeddings(self._name, self._revision)

    def hash(self) -> str:
        """Ask every engine for its executor's hash. Raises: RuntimeError, where they do not hold the same."""
        first, *others = set(self._pool.ask_all("hash", [()] * len(self._pool)))
        if others:
            raise RuntimeError(f"the executors' engines do not hold the same: {first} and {others}")
        return first

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        return self._shared("candidate_logprobs", prompts, candidates)

    def generate(
        self, prompts: Sequence[Prompt], admissible: Sequence[Sequence[str] | None]
    ) -> list[tuple[list[int], int | None]]:
        return self._shared("generate", prompts, admissible)

    def _shared(self, name: str, prompts: Sequence[Prompt], beside: Sequence[Any]) -> list[Any]:
        """Share rows out over the engines."""
        prompts = [prompt if prompt.soft is None else replace(prompt, soft=_whole(prompt.soft)) for prompt in prompts]
        parts = zip(_parts(prompts, len(self._pool)), _parts(beside, len(self._pool)), strict=True)
        return [row for rows in self._pool.ask_all(name, [part for part in parts if part[0]]) for row in rows]


def _parts(rows: Sequence[Any], n: int) -> list[Sequence[Any]]:
    """Cut rows into n parts of neighbours, as many in each or one more; some may be empty."""
    return [rows[i * len(rows) // n : (i + 1) * len(rows) // n] for i in range(n)]


def ray_compiler(engines: Engines, first: int) -> RayCompiler:
    """Make the client of the compilers for trainer number `first`."""
    ray = import_ray()
    return RayCompiler(Pool(ray, "compiler", engines.compilers, engines.rules, engines.tell, first), ray.put)


def ray_executor(config: ExecutorConfig, told: Told, engines: Engines, first: int) -> RayExecutor:
    """Make the client of the executors for trainer number `first`."""
    return RayExecutor(
        config, told, Pool(import_ray(), "executor", engines.executors, engines.rules, engines.tell, first)
    )
