"""Engines beside the trainers, as Ray actors: compilers for rollouts, executors for actions, and their clients.

A request contains all that its answer depends on: the weights (version, SHA-256 and files), the decoding, and the state
of the random numbers. So every engine, also one that replaces a lost one, gives the same answer. The client holds the
random numbers: with one engine they are those of the trainer's own compiler.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.prompt import Instructions
from compiler.records import Compilation, CompileRequest, Decoding
from configs.models import CompilerConfig, ExecutorConfig, model_path
from configs.training import Placement
from executor.base import Answer, TokenExecutor
from executor.build import Told, executor_rules, executor_view, load_executor
from lm.backbone import input_embeddings, load_encoder
from lm.prompt import Prompt
from runtime.cluster import ClusterError, import_ray
from runtime.ray_actors import loss_reason
from soft_mem.projector import Projector

if TYPE_CHECKING:
    from compiler.vllm import ServedWeights

PAUSE_S = 0.2  # between two checks for an available engine
TURN_S = 5.0  # longest wait for answers before the clock is checked
Report = Callable[[Mapping[str, Any]], object]  # records an event of a process
TENSORS = ("text_logprobs", "z", "noise", "mu", "log_sigma", "soft", "latent_logprobs")  # of a compilation
RandomState = int | Tensor  # a seed, or a generator's state


class WeightsError(RuntimeError):
    """A compilation used, or would have used, other weights than requested."""


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """Adapter and projector. `files`: reference to their contents (`bytes`) by path in a checkpoint."""

    version: int
    sha256: str
    files: Any


def ignore_report(row: Mapping[str, Any]) -> None:
    """Discard an event."""


@dataclass(frozen=True, slots=True)
class RayEngines:
    """Actors (`runtime.ray_actors.ObjectActor`) beside the trainers by role, and the settings for lost ones."""

    compilers: Sequence[Any]
    executors: Sequence[Any]
    placement: Placement
    report: Report = ignore_report


# -- in an engine's process --------------------------------------------------------------------------------------------


class CompilerEngine:
    """Compiles with the weights that a request names.

    Args:
        fetch: Reads `PolicyWeights.files`.
        versions: Number of weights that a vLLM engine keeps: trainers change to new ones at different moments.
    """

    def __init__(
        self,
        config: CompilerConfig,
        seed: int,
        instructions: Instructions,
        fetch: Callable[[Any], Mapping[str, bytes]] | None = None,
        versions: int = 2,
    ) -> None:
        self._is_vllm = config.engine == "vllm"
        self._compiler: Any = (
            load_served_compiler(config, seed, instructions)
            if self._is_vllm
            else load_compiler(config, None, seed, instructions)
        )
        self._fetch, self._versions = fetch or import_ray().get, versions
        self._lock = threading.Lock()  # of the weights, and in PyTorch of the compiler
        self._loaded: tuple[int, str] | None = None  # version and SHA-256, in PyTorch
        self._held: OrderedDict[tuple[int, str], ServedWeights] = OrderedDict()  # in vLLM, the newest last

    @property
    def broken(self) -> str | None:
        return self._compiler.broken

    def about(self) -> dict[str, Any]:
        return {}

    def compile(
        self, requests: Sequence[CompileRequest], decoding: Decoding, state: RandomState, weights: PolicyWeights
    ) -> tuple[list[Compilation], Tensor]:
        """Compile, and return the new state of the random numbers, too. Raises: WeightsError, if the weights do not
        match their hash; else as the compiler."""
        generator = self._compiler.generator
        if isinstance(state, int):
            generator.manual_seed(state)
        else:
            generator.set_state(state)
        return self._compile(requests, None, decoding, weights), generator.get_state()

    def compile_by_seeds(
        self, requests: Sequence[CompileRequest], seeds: Sequence[int], decoding: Decoding, weights: PolicyWeights
    ) -> list[Compilation]:
        """Compile each request by its own seed. With vLLM, calls of several threads share its batches. Raises: as
        `compile`."""
        return self._compile(requests, seeds, decoding, weights)

    def _compile(
        self,
        requests: Sequence[CompileRequest],
        seeds: Sequence[int] | None,
        decoding: Decoding,
        weights: PolicyWeights,
    ) -> list[Compilation]:
        if not self._is_vllm:
            with self._lock:
                self._load(weights)
                self._compiler.decoding = decoding
                return [_to_send(compilation) for compilation in self._compiler.compile(requests, seeds)]
        with self._lock:
            held = self._hold(weights)
        try:
            made = self._compiler.compile(requests, seeds, decoding=decoding, weights=held)
        finally:
            self._compiler.release(held)
        return [_to_send(compilation) for compilation in made]

    def _hold(self, weights: PolicyWeights) -> ServedWeights:
        """Return weights for one more call, in vLLM; the engine keeps the newest `versions`."""
        key = weights.version, weights.sha256
        if key not in self._held:
            with self._files(weights) as folder:
                projector = checkpoint.load_projector(folder)
                self._held[key] = self._compiler.add_weights(folder, weights.version, projector)
            if len(self._held) > self._versions:
                self._compiler.release(self._held.popitem(last=False)[1])
        return self._compiler.hold(self._held[key])

    def _load(self, weights: PolicyWeights) -> None:
        """Load weights in PyTorch, unless they are loaded."""
        if self._loaded == (weights.version, weights.sha256):
            return
        self._loaded = None  # until loading succeeds
        with self._files(weights) as folder:
            checkpoint.load(folder, self._compiler)
            self._compiler.weight_version = weights.version
        self._loaded = (weights.version, weights.sha256)

    @contextmanager
    def _files(self, weights: PolicyWeights) -> Iterator[Path]:
        """Write weights into a temporary folder. Raises: WeightsError, if they do not match their hash."""
        with TemporaryDirectory(prefix="memcompiler-weights-") as name:
            folder = Path(name)
            for path, data in self._fetch(weights.files).items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            if (found := _sha256(folder)) != weights.sha256:
                raise WeightsError(f"weights of version {weights.version} have hash {found}, not {weights.sha256}")
            yield folder


class ExecutorEngine:
    """Scores and generates actions; its clients encode prompts and choose."""

    def __init__(self, config: ExecutorConfig, environment: Told) -> None:
        executor = load_executor(config, environment)
        assert isinstance(executor, TokenExecutor)
        self._executor, self._batch_size = executor, config.batch_size if config.engine == "hf" else sys.maxsize

    @property
    def broken(self) -> str | None:
        loop = getattr(self._executor, "loop", None)  # of a vLLM engine
        return None if loop is None else loop.trouble

    def about(self) -> dict[str, Any]:
        return {"context": self._executor.context}

    def hash(self) -> str:
        return self._executor.hash()

    @torch.no_grad()
    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        scores = self._in_batches(self._executor.candidate_logprobs, prompts, candidates)
        return [_own_storage(score.cpu()) for score in scores]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._in_batches(self._executor.generate, prompts, admissible, *(() if seeds is None else (seeds,)))

    def _in_batches(self, method: Callable[..., Sequence[Any]], *columns: Sequence[Any]) -> list[Any]:
        """Call a method with batches of the size that an executor in a trainer has."""
        size = self._batch_size
        batches = (method(*(of[i : i + size] for of in columns)) for i in range(0, len(columns[0]), size))
        return [row for batch in batches for row in batch]


def _to_send(compilation: Compilation) -> Compilation:
    """Drop what the client has or can encode, and copy tensors out of their batch."""
    tensors = {name: value for name in TENSORS if (value := getattr(compilation, name)) is not None}
    own = {name: _own_storage(value) for name, value in tensors.items()}
    return replace(compilation, request=None, prompt=None, **own)


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy a view, because pickling a view includes its whole base tensor."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _sha256(folder: Path) -> str:
    """Hash the tensor files only: another process may write settings in another order."""
    digest = hashlib.sha256()
    for path in (folder / "adapter" / "adapter_model.safetensors", folder / "projector.safetensors"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call that an engine is processing."""

    call: int
    engine: int
    since: float = field(default_factory=time.monotonic)


class EnginePool:
    """Engines of one role, used by one trainer. Ray restarts a lost engine; meanwhile others take its calls.
    Thread-safe.

    Args:
        ray: The module.
        role: "compiler" or "executor".
        placement: How often a call is retried, and after which silence an engine counts as lost.
        first: Index of the engine that this trainer prefers for its first call.
    """

    def __init__(
        self, ray: Any, role: str, engines: Sequence[Any], placement: Placement, report: Report, first: int = 0
    ) -> None:
        self._ray, self._role, self._engines, self._placement = ray, role, list(engines), placement
        self._report, self._first = report, first
        self._lock = threading.RLock()  # of the next two
        self._busy = Counter[int]()  # calls in each engine
        self._lost: dict[int, Any] = {}  # pending `about` of lost engines; None: will not come back

    def __len__(self) -> int:
        return len(self._engines)

    def about(self) -> dict[str, Any]:
        """Return one engine's facts. Raises: ClusterError, if no engine is left."""
        while True:
            engine = self._pick_engine(0)
            try:
                return self._ray.get(self._engines[engine].about.remote())
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                self._lose(engine, loss_reason(error))

    def call_all(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method with each tuple of arguments, in parallel. Returns the results in order.

        Raises:
            ClusterError: A call's engines were lost `retries` + 1 times, or no engine is left.
            Exception: What an engine raised.
        """
        results: list[Any] = [None] * len(calls)
        losses: dict[int, tuple[str, ...]] = {i: () for i in range(len(calls))}
        waiting, pending = deque(losses), dict[Any, _PendingCall]()
        silence = f"no answer for {self._placement.unresponsive_s:g} s"
        while waiting or pending:
            while waiting:
                call = waiting.popleft()
                engine = self._pick_engine(call)
                self._busy[engine] += 1
                pending[self._engines[engine].call.remote(method, *calls[call])] = _PendingCall(call, engine)
            ready, others = self._ray.wait(list(pending), num_returns=1, timeout=TURN_S)
            silent = self._kill_silent({ref: pending[ref] for ref in others})
            outcomes = [(ref, *self._get(ref)) for ref in ready] + [(ref, None, silence) for ref in silent]
            for ref, result, reason in outcomes:
                one = pending.pop(ref)
                self._busy[one.engine] -= 1
                if not reason:
                    results[one.call] = result
                    continue
                self._lose(one.engine, reason)
                losses[one.call] += (reason,)
                if (n := len(losses[one.call])) > self._placement.retries:
                    raise ClusterError(f"{n} {self._role}s were lost over a request: {'; '.join(losses[one.call])}")
                waiting.append(one.call)
        return results

    def _get(self, ref: Any) -> tuple[Any, str]:
        """Return a result, or why its engine is lost. Raises: what the engine raised."""
        try:
            return self._ray.get(ref), ""
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # process, node or result is lost
            return None, loss_reason(error)

    def _pick_engine(self, call: int) -> int:
        """Pick the available engine with the fewest calls, if possible always the same one for a call; wait for one if
        none is available."""
        due = time.monotonic() + self._placement.unresponsive_s
        order = [(self._first + call + i) % len(self._engines) for i in range(len(self._engines))]
        while True:
            with self._lock:
                self._poll_lost_engines()
                if left := [engine for engine in order if engine not in self._lost]:
                    return min(left, key=self._busy.__getitem__)
            if all(about is None for about in self._lost.values()) or time.monotonic() > due:
                raise ClusterError(
                    f"no {self._role} is left: each was replaced {self._placement.restarts} times "
                    f"(placement.restarts), or no node has had room for it for {self._placement.unresponsive_s:g} s"
                )
            time.sleep(PAUSE_S)

    def _poll_lost_engines(self) -> None:
        """Update which lost engines are back, or given up by Ray."""
        for engine, about in list(self._lost.items()):
            if about is None or not self._ray.wait([about], timeout=0)[0]:
                continue
            try:
                facts = self._ray.get(about)
            except self._ray.exceptions.ActorDiedError as error:  # Ray will not restart it
                self._lost[engine] = None
                self._report_event(engine, "given up", loss_reason(error))
            except self._ray.exceptions.RayError:  # not yet
                self._lost[engine] = self._engines[engine].about.remote()
            else:
                del self._lost[engine]
                self._report_event(engine, "back", **facts)

    def _kill_silent(self, pending: Mapping[Any, _PendingCall]) -> list[Any]:
        """Kill engines that exceed `unresponsive_s`; return the references of their calls."""
        due = time.monotonic() - self._placement.unresponsive_s
        late = [ref for ref, one in pending.items() if one.since < due]
        for engine in {pending[ref].engine for ref in late}:
            self._ray.kill(self._engines[engine], no_restart=False)
        return late

    def _lose(self, engine: int, reason: str) -> None:
        with self._lock:
            if engine not in self._lost:
                self._lost[engine] = self._engines[engine].about.remote()
                self._report_event(engine, "lost", reason)

    def _report_event(self, engine: int, event: str, reason: str = "", **facts: Any) -> None:
        row = {"role": self._role, "number": engine, "event": event, "reason": reason, "at": time.time(), **facts}
        self._report(row)


class _RandomStates:
    """Random state of each part of a batch, between calls: a `training.rollout.Seedable`."""

    def __init__(self) -> None:
        self._states: dict[int, RandomState] = {}
        self._seed = 0

    def manual_seed(self, seed: int) -> None:
        self._seed = seed
        self._states.clear()

    def __getitem__(self, part: int) -> RandomState:
        return self._states.get(part, self._seed + part * 2**40)  # distinct from other trainers' and updates' seeds

    def __setitem__(self, part: int, state: Tensor) -> None:
        self._states[part] = state


class RayCompiler:
    """Client of compiler engines: a `training.rollout.RolloutPolicy`. A batch is split into as many parts as there are
    engines, available or not, so that samples depend on the number of engines only.

    Args:
        concurrent: the engines answer calls of several threads side by side, as vLLM's do.
    """

    takes_seeds = True

    def __init__(self, pool: EnginePool, put: Callable[[Any], Any], concurrent: bool = False) -> None:
        self._pool, self._put, self.concurrent = pool, put, concurrent
        self.decoding, self.generator = Decoding(), _RandomStates()
        self._weights: PolicyWeights | None = None

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None:
        """Use the weights in `folder` from now on."""
        digest = _sha256(folder)
        if self._weights is None or (self._weights.version, self._weights.sha256) != (version, digest):
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
            }
            self._weights = PolicyWeights(version, digest, self._put(files))

    def compile(self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None) -> list[Compilation]:
        """Compile each request, in order, with the weights that are loaded now. Raises: WeightsError, if an engine used
        other weights; else as `EnginePool.call_all`."""
        weights, decoding, n = self._weights, self.decoding, len(self._pool)
        assert weights is not None  # call `load_adapter` first
        if seeds:
            parts = [pair for pair in zip(_split(requests, n), _split(seeds, n), strict=True) if pair[0]]
            answers = self._pool.call_all("compile_by_seeds", [(*pair, decoding, weights) for pair in parts])
            made = [compilation for compiled in answers for compilation in compiled]
        else:
            numbered = [(i, part) for i, part in enumerate(_split(requests, n)) if part]
            calls = [(part, decoding, self.generator[i], weights) for i, part in numbered]
            made = []
            for (i, _), (compiled, state) in zip(numbered, self._pool.call_all("compile", calls), strict=True):
                self.generator[i] = state
                made += compiled
        for request, compilation in zip(requests, made, strict=True):
            if compilation.weight_version != weights.version:
                raise WeightsError(
                    f"compiled with weights of version {compilation.weight_version}, not {weights.version}"
                )
            compilation.request = request
        return made


class RayExecutor(TokenExecutor):
    """Client of executor engines. Encodes prompts and samples actions itself, so that calls can be retried."""

    def __init__(self, config: ExecutorConfig, environment: Told, pool: EnginePool) -> None:
        self.concurrent = config.engine == "vllm"
        self._name, self._revision, self._pool = model_path(config.model), config.revision, pool
        encoder = load_encoder(self._name, config.memory_token, config.revision, config.chat_template)
        super().__init__(
            encoder,
            executor_rules(config, environment),
            max_new_tokens=config.max_new_tokens,
            images=config.images,
            temperature=config.temperature,
            reads=executor_view(config, environment),
        )
        self.mode = config.mode
        self.context = pool.about()["context"]

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """Read the embedding table (V, d) from the model's files."""
        return input_embeddings(self._name, self._revision)

    def hash(self) -> str:
        """Return the hash of the engines' executors. Raises: RuntimeError, if they differ."""
        first, *others = set(self._pool.call_all("hash", [()] * len(self._pool)))
        if others:
            raise RuntimeError(f"executor engines hold different models: {first} and {others}")
        return first

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        return self._call_in_parts("candidate_logprobs", prompts, candidates)

    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._call_in_parts("generate", prompts, admissible, *(() if seeds is None else (seeds,)))

    def _call_in_parts(self, method: str, prompts: Sequence[Prompt], *columns: Sequence[Any]) -> list[Any]:
        """Distribute rows over the engines."""
        own = [p if p.soft is None else replace(p, soft=_own_storage(p.soft)) for p in prompts]
        n = len(self._pool)
        calls = [part for part in zip(*(_split(of, n) for of in (own, *columns)), strict=True) if part[0]]
        return [row for rows in self._pool.call_all(method, calls) for row in rows]


def _split(rows: Sequence[Any], n: int) -> list[Sequence[Any]]:
    """Split rows into n contiguous parts whose lengths differ by one at most; some may be empty."""
    return [rows[i * len(rows) // n : (i + 1) * len(rows) // n] for i in range(n)]


def ray_compiler(engines: RayEngines, trainer: int, concurrent: bool) -> RayCompiler:
    """Create a trainer's client of the compiler engines; `concurrent` as in `RayCompiler`."""
    ray = import_ray()
    pool = EnginePool(
        ray=ray,
        role="compiler",
        engines=engines.compilers,
        placement=engines.placement,
        report=engines.report,
        first=trainer,
    )
    return RayCompiler(pool, ray.put, concurrent)


def ray_executor(config: ExecutorConfig, environment: Told, engines: RayEngines, trainer: int) -> RayExecutor:
    """Create a trainer's client of the executor engines."""
    pool = EnginePool(
        ray=import_ray(),
        role="executor",
        engines=engines.executors,
        placement=engines.placement,
        report=engines.report,
        first=trainer,
    )
    return RayExecutor(config, environment, pool)
