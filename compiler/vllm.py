"""The Memory Compiler in vLLM, with the prompts, distribution and soft tokens of `compiler.hf`.

A call takes two passes, beside those of other threads in the same engine (`lm.engine_loop`):
1. sample the emissions;
2. read prompt, emission and the N memory tokens as a new request, whose last N hidden states go through the projector.
   The prefix cache holds the rest up to a whole block, so this pass computes at most N + one block of new tokens (and
   one more if the end of turn was forced).

Prompts enter as ids, and generated tokens are not tokenised again.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiler.base import Draft, Generators, TokenCompiler, no_text
from compiler.prompt import Instructions
from compiler.records import Compilation, CompileRequest, Decoding, Entries, History, StillWanted, never_cancelled
from configs.models import Speed
from lm.engine_loop import EngineLoop
from lm.prompt import Prompt, PromptEncoder
from lm.vllm import EXTENSION, SETTINGS, check_prompt_ids, sampling_arguments, tail_of, token_logprobs, vllm_request
from soft_mem.projector import Gaussian, Projector

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_SERIALS = itertools.count(1)  # of adapters, which engine and prefix cache identify by name and number


@dataclass(slots=True, eq=False)
class ServedWeights:
    """An adapter in the engine with its projector, which are removed when `users` is 0."""

    lora: LoRARequest | None
    projector: Projector
    version: int
    users: int = 1  # who added it, and every call in flight


class VllmCompiler(TokenCompiler):
    """The vLLM backend, without an adapter until `load_adapter`. Thread-safe: calls of several threads share the
    engine's batches, and a call keeps the weights and the decoding with which it began.

    Args:
        llm: an engine with the settings of `engine_settings`.
    """

    concurrent = True

    def __init__(
        self,
        llm: LLM,
        encoder: PromptEncoder,
        projector: Projector,
        decoding: Decoding | None = None,
        instructions: Instructions = "",
        seed: int = 0,
        device: str = "cpu",
        speed: Speed | None = None,
        history: History = 1,
        entries: Entries = "whole",
    ) -> None:
        self.llm, self.encoder, self.device = llm, encoder, torch.device(device)
        self.context = llm.model_config.max_model_len
        self.decoding, self.instructions = decoding or Decoding(), instructions
        self.speed, self.history, self.entries = speed or Speed(), history, entries
        self.projector, self.weight_version = self._frozen(projector), 0
        self.weights = ServedWeights(None, self.projector, 0)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.speculates = llm.llm_engine.vllm_config.speculative_config is not None
        self.reissued = 0  # second passes that were repeated because the prefix cache held part of the tail
        self.loop = EngineLoop.of(llm)
        self._adapters = tempfile.TemporaryDirectory(prefix="memcompiler-adapters-")
        self._tail_keys = itertools.count()
        self._lock = threading.RLock()  # of weights and the numbers of their users
        self._whole = self  # of which a call's copy was made
        self.loop.call(lambda: llm.collective_rpc("watch_tails"))

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None:
        """Compile with these weights from now on; calls in flight keep theirs. Folder and projector are copied.

        Args:
            folder: an adapter in PEFT's format, or a checkpoint with an `adapter/`.
            version: the `weight_version` of compilations.

        Raises:
            ValueError: the projector does not fit the compiler.
            RuntimeError: vLLM cannot load the adapter. After either error the previous weights remain.
        """
        new = self.add_weights(folder, version, projector)
        with self._lock:
            before, self.weights = self.weights, new
            self.projector, self.weight_version = new.projector, version
        self.release(before)

    def add_weights(self, folder: Path, version: int, projector: Projector) -> ServedWeights:
        """Load further weights, which stay in the engine until `release`. Arguments and errors: as `load_adapter`.

        Every adapter gets a new directory, name and number: engine and prefix cache identify adapters by these, and
        would serve stale weights for an adapter that is overwritten in place.
        """
        from vllm.lora.request import LoRARequest

        serial = next(_SERIALS)
        source = folder / "adapter" if (folder / "adapter").is_dir() else folder
        target = Path(self._adapters.name) / f"{serial:06d}-v{version}"
        frozen = self._frozen(projector)
        try:
            shutil.copytree(source, target)
            request = LoRARequest(f"memcompiler-{serial}", serial, str(target))
            if not self.loop.call(lambda: self.llm.llm_engine.add_lora(request)):
                raise ValueError("the engine does not say why")
        except Exception as error:  # vLLM's errors have no common class
            shutil.rmtree(target, ignore_errors=True)
            raise RuntimeError(
                f"vLLM cannot load the adapter {source}: {error}. Check that it is complete, of this model, and of "
                "a rank no larger than the engine's max_lora_rank"
            ) from error
        return ServedWeights(request, frozen, version)

    def hold(self, weights: ServedWeights) -> ServedWeights:
        """Keep weights for one more user, until they are released."""
        with self._lock:
            weights.users += 1
        return weights

    def release(self, weights: ServedWeights) -> None:
        """Give up weights; remove them from engine and disk if no call uses them any more."""
        with self._lock:
            weights.users -= 1
            last = weights.users == 0
        if last and (lora := weights.lora) is not None:
            self.loop.call(lambda: self.llm.llm_engine.remove_lora(lora.lora_int_id))
            shutil.rmtree(lora.lora_path, ignore_errors=True)

    @torch.no_grad()
    def compile(
        self,
        requests: Sequence[CompileRequest],
        seeds: Sequence[int] | None = None,
        wanted: StillWanted = never_cancelled,
        decoding: Decoding | None = None,
        weights: ServedWeights | None = None,
    ) -> list[Compilation]:
        """Compile as `TokenCompiler.compile`, with this decoding and these weights (default: the present ones)."""
        with self._with_weights(weights) as one:
            one.decoding = decoding or one.decoding
            return TokenCompiler.compile(one, requests, seeds, wanted)

    @contextmanager
    def _with_weights(self, weights: ServedWeights | None) -> Iterator[VllmCompiler]:
        """Yield a copy for one call, whose weights stay in the engine meanwhile."""
        with self._lock:
            one = copy.copy(self)
            one.weights = held = weights or self.weights
            one.projector, one.weight_version = held.projector, held.version
            self.hold(held)
        try:
            yield one
        finally:
            self.release(held)

    @property
    def broken(self) -> str | None:
        """Return why this engine can never compile again, as far as is known without calling it."""
        return self.loop.trouble

    def _draft(
        self, requests: Sequence[CompileRequest], prompts: Sequence[Prompt], by: Generators, wanted: StillWanted
    ) -> tuple[list[Draft], Gaussian]:
        drafts = self._sample(prompts, by, wanted) if self.writes_text else [no_text()] * len(prompts)
        rows = [i for i, d in enumerate(drafts) if self.makes_soft(requests[i], d.ids, d.truncated)]
        hidden = torch.zeros(len(drafts), self.n_tokens, self.projector.config.d_compiler)
        if rows:
            chosen = [prompts[i] for i in rows], [drafts[i] for i in rows]
            hidden[rows] = self._hidden(*chosen, lambda k: wanted(rows[k]))
        return drafts, self.projector(hidden.to(self.device))

    def _sample(self, prompts: Sequence[Prompt], by: Generators, wanted: StillWanted) -> list[Draft]:
        """Run the first pass. Each request gets a seed from the batch's generator or its own."""
        from vllm import SamplingParams

        decoding, end = self.decoding, self.encoder.end_id
        if not (decoding.temperature == 0 or 0.01 <= decoding.temperature <= 2):
            raise ValueError(f"vLLM samples at temperature 0, or 0.01 to 2, not at {decoding.temperature}")
        if self.speculates and decoding.temperature:
            raise ValueError("a speculating engine samples greedily only: set compiler.speed.ngram to 0")
        drawn = [(by, len(prompts))] if isinstance(by, torch.Generator) else [(own, 1) for own in by]
        seeds = torch.cat([torch.randint(2**31, (n,), generator=own, device=self.device) for own, n in drawn]).tolist()
        params = [
            SamplingParams(
                temperature=decoding.temperature,
                seed=seed,
                max_tokens=decoding.max_new_tokens,
                stop_token_ids=[end],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                **self._bans(),
            )
            for seed in seeds
        ]
        return [_draft_of(output, end) for output in self._run(prompts, [()] * len(prompts), params, wanted)]

    def _bans(self) -> dict[str, Any]:
        """Return the parameters that ban reserved tokens: a logit bias or, with speculation, where vLLM refuses that,
        banned words."""
        if not self.speculates:
            return {"logit_bias": dict.fromkeys(self.encoder.suppressed, -torch.inf)}
        words = [self.encoder.tokenizer.decode([id]) for id in self.encoder.suppressed]
        if [self.encoder.chat_ids(word) for word in words] != [(id,) for id in self.encoder.suppressed]:
            raise ValueError(
                "vLLM cannot ban a reserved token that this tokenizer splits: set compiler.speed.ngram to 0"
            )
        return {"bad_words": words}

    def _hidden(self, prompts: Sequence[Prompt], drafts: Sequence[Draft], wanted: StillWanted) -> Tensor:
        """Run the second pass: final hidden states (B, N, d) of the memory tokens, in fp32; zeros if cancelled.

        A repeated request (equal samples of a group) may find part of its tail in the prefix cache, which holds no
        hidden states: it is sent again, past the cache.
        """
        memory = (self.encoder.memory_id,) * self.n_tokens
        tails = [(*draft.ids, *memory) for draft in drafts]
        rows = self._tails(prompts, tails, wanted, past_cache=False)
        short = [i for i, row in enumerate(rows) if row is None and wanted(i)]
        with self._lock:
            self._whole.reissued += len(short)
        again = self._tails(
            [prompts[i] for i in short], [tails[i] for i in short], lambda i: wanted(short[i]), past_cache=True
        )
        for i, row in zip(short, again, strict=True):
            rows[i] = row
        if any(row is None and wanted(i) for i, row in enumerate(rows)):
            raise RuntimeError("vLLM's workers gave no hidden states for some requests: is the extension installed?")
        nothing = torch.zeros(self.n_tokens, self.projector.config.d_compiler)
        return torch.stack([nothing if row is None else row for row in rows])

    def _tails(
        self, prompts: Sequence[Prompt], then: Sequence[Sequence[int]], wanted: StillWanted, past_cache: bool
    ) -> list[Tensor | None]:
        from vllm import SamplingParams

        if not prompts:
            return []
        keys = [str(next(self._tail_keys)) for _ in prompts]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                extra_args=tail_of(key, self.n_tokens),
                skip_reading_prefix_cache=past_cache,
            )
            for key in keys
        ]
        outputs: list[Any] = self._run(prompts, then, params, wanted)
        return [None if output is None else output.tail for output in outputs]

    def _run(
        self, prompts: Sequence[Prompt], then: Sequence[Sequence[int]], params: Sequence[Any], wanted: StillWanted
    ) -> list[RequestOutput | None]:
        rows = list(zip(prompts, then, strict=True))
        requests = [vllm_request(self.encoder, prompt, ids) for prompt, ids in rows]
        outputs = self.loop.run(requests, params, lora=self.weights.lora, wanted=wanted)
        check_prompt_ids(outputs, [(*prompt.ids, *ids) for prompt, ids in rows])
        return outputs

    def _frozen(self, projector: Projector) -> Projector:
        d = self.llm.model_config.get_hidden_size()
        if projector.config.d_compiler != d:
            raise ValueError(f"projector reads {projector.config.d_compiler}-d states, the compiler has {d}")
        return copy.deepcopy(projector).to(self.device).eval().requires_grad_(False)


def engine_settings(lora_rank: int, ngram: int = 0) -> dict[str, Any]:
    """Return this backend's settings of `vllm.LLM` beyond model and dtype; `ngram` as in `configs.models.Speed`."""
    ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has kernels for these
    return {
        **SETTINGS,
        "enable_lora": True,
        "max_loras": 2,  # the present weights, and those of requests that began before a change
        "max_lora_rank": next((rank for rank in ranks if rank >= lora_rank), lora_rank),
        "worker_extension_cls": EXTENSION,
        **({"speculative_config": {**LOOKUP, "num_speculative_tokens": ngram}} if ngram else {}),
        **sampling_arguments(),
    }


def _draft_of(output: RequestOutput | None, end: int) -> Draft:
    if output is None:  # cancelled
        return Draft((end,), torch.zeros(0), True, 0)
    ids = tuple(output.outputs[0].token_ids)
    logprobs = torch.tensor(token_logprobs(output.outputs[0].logprobs, ids))
    truncated = ids[-1] != end
    return Draft((*ids, end) if truncated else ids, logprobs, truncated, output.num_cached_tokens or 0)
