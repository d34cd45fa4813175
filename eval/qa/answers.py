"""`memcompiler qa`: a fixed reader answers questions about histories from the evidence that a memory packs.

OUT/answers.jsonl      one row per question, written as soon as it is answered; a resumed run repeats no request
OUT/results.json       scores by category, abstention, tokens per question, the reader's usage
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import typer

from configs.collect import MemoryModels
from configs.models import EndpointConfig
from configs.run_folder import output_folder
from data_gen.questions.records import Question, QuestionSet
from eval.qa.benchmark_files import read_question_sets
from eval.qa.metrics import abstains, bleu_1, locomo_score, set_f1
from eval.qa.readers import ABSTAIN, EndpointReader, Reader, VllmReader, build_prompt, render_pack
from eval.qa.retrievers import Evidence, Retriever, open_retriever
from eval.qa.summary import failure_line, failure_reason, summarise, to_markdown
from lm.answer_cache import Answer
from memory.protocol import TokenCosts
from memory.registry import RESPONSES
from memory.words import word_tokens
from runtime.attempts import ATTEMPTS, RetriedResults
from runtime.progress import progress
from runtime.store import JsonLines, to_json, write_atomically

ANSWERS, RESULTS, SETTINGS = "answers.jsonl", "results.json", "asked.json"
BATCH = 16  # questions per batch, which a kill may cost


@dataclass(frozen=True, slots=True)
class QaSettings:
    """The settings that a run's answers depend on.

    Attributes:
        tokens: budget of a question's evidence.
        facts: read the data's notes (`QuestionSet.facts`) instead of its records.
        limit: number of questions (None: all).
        models: the memory's models, by role.
        picture: tokens of a picture; 0 shows none.
        counted: "reader" if the reader's tokenizer counts the budget, "" if it is estimated.
    """

    data: str
    memory: str
    settings: Mapping[str, Any]
    tokens: int
    facts: bool
    reader: str
    limit: int | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    picture: int = 0
    counted: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields; newer ones only if set, so that older runs resume."""
        newer = ("models", "picture", "counted")
        return {name: value for name, value in asdict(self).items() if name not in newer or value}


def run_qa(
    data: Path,
    *,
    memory: str,
    settings: Mapping[str, Any],
    tokens: int,
    facts: bool,
    reader: tuple[str, str, Mapping[str, Any]],
    limit: int | None,
    out: Path,
    models: MemoryModels,
    picture: int = 0,
    attempts: int = ATTEMPTS,
) -> None:
    """Answer the questions of a file and print the scores. `reader`: engine, model and endpoint settings."""
    sets = read_question_sets(data)
    engine, model, _ = reader
    run = QaSettings(
        data=data.name,
        memory=memory,
        settings=settings,
        tokens=tokens,
        facts=facts,
        reader=f"{engine}:{model}",
        limit=limit,
        models=models.model_names(),
        picture=picture,
        counted="" if engine == "endpoint" else "reader",  # an endpoint's tokenizer is unknown
    )
    with output_folder(out, "qa", (SETTINGS, ANSWERS, RESULTS, "memory"), "reader", inputs=[("--data", data)]):
        loaded = load_reader(*reader, out=out, sees=picture > 0)
        cached = models.cached_in(out / RESPONSES)
        typer.echo(to_markdown(answer_questions(run, sets, loaded, out, models=cached, attempts=attempts)))


def load_reader(engine: str, model: str, api: Mapping[str, Any], out: Path, sees: bool = False) -> Reader:
    """Load a reader.

    Args:
        engine: hf, vllm or endpoint.
        api: settings of the endpoint.
        out: the folder that stores the endpoint's answers.
        sees: the reader is shown pictures.

    Raises:
        ValueError: the engine or the model cannot read pictures.
    """
    if engine == "endpoint":
        return EndpointReader.load(EndpointConfig.model_validate({**api, "model": model}), out / RESPONSES)
    if engine == "vllm":
        if sees:
            raise ValueError("readers on vLLM read no pictures here: set --engine hf or endpoint")
        return VllmReader.load(model)
    from eval.qa.hf_readers import HfReader, HfVisionReader

    return HfVisionReader.load(model) if sees else HfReader.load(model)


def answer_questions(
    run: QaSettings,
    sets: Sequence[QuestionSet],
    reader: Reader,
    out: Path,
    *,
    models: MemoryModels | None = None,
    attempts: int = ATTEMPTS,
) -> dict[str, Any]:
    """Answer all questions that have no answer yet, and failed ones with attempts left; write and return the results.

    Args:
        models: models of the memory.
        attempts: at each question, over all runs.

    Raises:
        ValueError: OUT holds answers of other settings, or every answer failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    path, wanted = out / SETTINGS, to_json(run.to_json())
    if path.exists() and (found := path.read_text(encoding="utf-8")) != wanted:
        raise ValueError(f"{out} holds answers of {found}: name another folder for {wanted}")
    write_atomically(path, wanted)
    lines = JsonLines(out / ANSWERS, ("id", "answer", "failed"))
    rows = RetriedResults(lines, itemgetter("id"), attempts, failure_reason)
    answered = set(rows.load())
    chosen = select_questions(sets, run.limit)
    count = lru_cache(2**14)(lambda text: reader.count((f"{text}\n",))) if run.counted else word_tokens
    costs = TokenCosts(count, run.picture)
    with progress("questions", sum(map(len, chosen.values())), len(answered)) as advance:
        for n, each in enumerate(sets):
            left = [q for q in chosen[each.id] if q.id not in answered]
            if not left:
                continue
            folder = out / "memory" / f"{n}-{hashlib.sha256(each.id.encode()).hexdigest()[:8]}"
            retrieve = open_retriever(
                run.memory, each, run.settings, folder, facts=run.facts, models=models, costs=costs
            )
            for start in range(0, len(left), BATCH):
                batch = left[start : start + BATCH]
                scored = _answer_batch(batch, retrieve, reader, run.tokens, picture=run.picture)
                rows.add((row["id"], to_json(row, ascii=True)) for row in scored)
                for question in batch:
                    advance(question)
    rows.load()
    results = {**run.to_json(), **summarise(list(lines)), "broken_due": len(rows.due)}
    if results["n"] and results["failed"] == results["n"]:
        raise ValueError(f"no results of {out}, {failure_line(results)}")
    write_atomically(out / RESULTS, to_json(results, indent=1))
    return results


def select_questions(sets: Sequence[QuestionSet], limit: int | None) -> dict[str, list[Question]]:
    """Select about `limit` questions by set id, in proportion to the categories; the selection is deterministic."""
    everything = [(each.id, question) for each in sets for question in each.questions]
    if limit is not None and limit < len(everything):
        by_category: dict[str, list[tuple[str, Question]]] = {}
        for pair in everything:
            by_category.setdefault(pair[1].category, []).append(pair)
        order = lambda pair: hashlib.sha256(pair[1].id.encode()).hexdigest()
        everything = [
            pair
            for of in by_category.values()
            for pair in sorted(of, key=order)[: max(1, round(limit * len(of) / len(everything)))]
        ]
    found: dict[str, list[Question]] = {each.id: [] for each in sets}
    for id, question in everything:
        found[id].append(question)
    return found


def _answer_batch(
    batch: Sequence[Question], retrieve: Retriever, reader: Reader, tokens: int, *, picture: int
) -> Iterable[dict[str, Any]]:
    """Retrieve evidence, have the reader answer, and score the answers. The reader sees pack, question and options."""
    packs = [retrieve(question, tokens) for question in batch]
    prompts = [build_prompt(p.texts, q.text, q.options, p.pictures) for p, q in zip(packs, batch, strict=True)]
    started = time.perf_counter()
    answers = reader.answer(prompts)
    seconds = (time.perf_counter() - started) / len(batch)
    log_probs = reader.log_probs(prompts, [ABSTAIN if q.absent else q.answer for q in batch])
    for question, pack, got, log_prob in zip(batch, packs, answers, log_probs, strict=True):
        answer = got if isinstance(got, Answer) else None
        text, shown = answer.text if answer else "", render_pack(pack.texts, pack.pictures)
        estimated = Evidence.of(pack.texts, (), TokenCosts(picture=picture), pack.pictures).tokens
        yield {
            "id": question.id,
            "category": question.category,
            "answer": text,
            "gold": question.answer,
            "failed": answer is None,
            "error": f"{type(got).__name__}: {got}" if isinstance(got, Exception) else "",
            "abstained": abstains(text),
            "absent": question.absent,
            "recall": pack.recall(question.evidence) if question.evidence else None,
            "tokens": reader.count(shown) if shown else 0,
            "word_tokens": estimated,
            "reader_in": answer.tokens_in if answer else 0,
            "reader_out": answer.tokens_out if answer else 0,
            "seconds": seconds,
            "f1": set_f1(text, question.answer),
            "bleu_1": bleu_1(text, question.answer),
            "locomo": locomo_score(text, question.answer, "adversarial" if question.absent else question.category),
            "logprob": log_prob,
            "pictures": sum(map(len, pack.pictures)),
        }
