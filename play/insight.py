"""What the page shows beyond the records: probabilities of commands, and the words nearest to soft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compiler.language import Emission, render
from compiler.records import Compilation, Compiler, CompileRequest, soft_is_read
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Executor

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 3  # nearest words per soft token


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Probabilities of the admissible commands, in their order: as delivered, and without what was delivered at this
    step (None if nothing was)."""

    given: tuple[float, ...]
    bare: tuple[float, ...] | None


def command_probabilities(executor: Executor, request: ExecutorRequest) -> Probabilities | None:
    """Compute the probabilities of the admissible commands; None for an executor that does not score commands."""
    score, commands = getattr(executor, "candidate_logprobs", None), request.admissible
    if score is None or not commands:
        return None
    import torch

    bare = replace(request, delivered=MemoryBlock())
    requests = [request] if request.delivered == bare.delivered else [request, bare]
    prompts = [executor.encode(one) for one in requests]  # type: ignore[attr-defined]
    with torch.no_grad():
        scores = score(prompts, [commands] * len(prompts))
    found = [tuple(float(p) for p in row.float().cpu().softmax(0)) for row in scores]
    return Probabilities(found[0], found[1] if len(found) > 1 else None)


def soft_tokens(executor: Executor, compilation: Compilation | None) -> list[dict[str, Any]]:
    """Describe the soft tokens of a compilation one by one: norm of z, mean sigma, and the words whose embeddings are
    nearest by cosine (none for an executor whose embeddings are not here)."""
    if compilation is None or compilation.z is None:
        return []
    words = nearest_words(executor, compilation.soft)
    norms = compilation.z.norm(dim=-1).tolist()
    sigma = compilation.log_sigma
    sigmas = sigma.exp().mean(-1).tolist() if sigma is not None else [None] * len(norms)
    return [
        {"norm": norm, "sigma": spread, "words": near} for norm, spread, near in zip(norms, sigmas, words, strict=True)
    ]


def nearest_words(executor: Executor, soft: Tensor | None, k: int = WORDS) -> list[list[tuple[str, float]]]:
    """Return the k words nearest to each soft token (N, d), with their cosines."""
    if soft is None:
        return []
    table, tokenizer = getattr(executor, "embedding_table", None), getattr(executor, "tokenizer", None)
    if table is None or tokenizer is None:
        return [[] for _ in range(len(soft))]
    import torch

    with torch.no_grad():
        unit = torch.nn.functional.normalize(table.float(), dim=-1)
        likeness = torch.nn.functional.normalize(soft.to(unit), dim=-1) @ unit.T
        best = likeness.topk(min(k, len(unit)), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(_word(tokenizer, id), value) for id, value in zip(ids, values, strict=True)] for ids, values in rows]


def _word(tokenizer: Any, id: int) -> str:
    """Return a token's text; its name where it is only a part of a character."""
    text = tokenizer.decode([id])
    return str(tokenizer.convert_ids_to_tokens(id)) if "\N{REPLACEMENT CHARACTER}" in text else text


def compile_as_written(compiler: Compiler, request: CompileRequest, emission: Emission) -> Compilation:
    """Return the compilation of an emission that somebody else wrote. A compiler with local weights adds the soft
    tokens that it computes beside this emission (their mean); others add none."""
    text = render(emission)
    written = Compilation(text, emission, request=request)
    score = getattr(compiler, "score", None)
    if score is None or not soft_is_read(request.soft_on, emission):
        return written
    return _with_soft(compiler, written, request)


def _with_soft(compiler: Any, written: Compilation, request: CompileRequest) -> Compilation:
    """Add the mean soft tokens that the compiler computes beside a written emission."""
    import torch

    was_training, prompt = compiler.training, compiler.encode(request)
    compiler.eval()
    with torch.no_grad():
        gaussian = compiler.score([prompt], [compiler.emission_ids(written.text)]).gaussian
        mu, log_sigma = gaussian.mu[0].float().cpu(), gaussian.log_sigma[0].float().cpu()
    compiler.train(was_training)
    soft = compiler.projector.to_embeddings(mu)
    return replace(written, prompt_ids=prompt.ids, z=mu, mu=mu, log_sigma=log_sigma, soft=soft)


def as_extra(probabilities: Probabilities | None, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return both as the page reads them."""
    shown = None if probabilities is None else {"given": probabilities.given, "bare": probabilities.bare}
    return {"probabilities": shown, "soft_tokens": list(tokens)}
