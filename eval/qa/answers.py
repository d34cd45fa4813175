"""memcompiler qa: questions about histories, answered by a fixed reader from what a memory packs; beside episodes.

OUT/answers.jsonl      a row per question, on disk as soon as it is answered; a killed run asks nothing twice
OUT/results.json       scores by category, abstention apart, tokens per question, what the reader used
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

from configs.collect import MemoryModels
from data_gen.cases import Case, Question
from eval.intervals import bootstrap_mean
from eval.qa.evidence import Asking, Evidence, asking
from eval.qa.metrics import abstains, bleu_1, locomo_score, set_f1
from eval.qa.readers import ABSTAIN, Reader, prompt_of, shown_of
from eval.table import markdown_table
from lm.ledger import Answer
from memory.protocol import Costs
from memory.words import word_tokens
from runtime.attempts import ATTEMPTS, Attempts, broken_facts
from runtime.progress import progress
from runtime.store import JsonLines, to_json, write_atomically

ANSWERS, RESULTS, ASKED = "answers.jsonl", "results.json", "asked.json"
BATCH = 16  # questions that are answered together, and that a kill may cost
SCORES = ("f1", "bleu_1", "locomo")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run's answers follow from."""

    data: str
    memory: str
    settings: Mapping[str, Any]
    tokens: int
    facts: bool
    reader: str
    limit: int | None = None
    models: Mapping[str, str] = field(default_factory=dict)  # those that the memory uses, by what for
    picture: int = 0  # tokens of a picture, where the reader is shown those of the records
    counted: str = ""  # "reader": the budget is of its own tokens; "": of estimated ones

    def to_json(self) -> dict[str, Any]:
        """Return it as the run's files say it, without defaults of fields that older runs lack."""
        later = ("models", "picture", "counted")
        return {name: value for name, value in asdict(self).items() if name not in later or value}


def run_answers(
    asked: Asked,
    cases: Sequence[Case],
    reader: Reader,
    out: Path,
    models: MemoryModels | None = None,
    attempts: int = ATTEMPTS,
) -> dict[str, Any]:
    """Answer what is not answered yet, or has failed with attempts left; return and write the results.

    Args:
        models: that the memory may use.
        attempts: at a question whose answer fails, over all runs.

    Raises:
        ValueError: OUT holds answers that follow from something else, or every answer failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    mark, told = out / ASKED, to_json(asked.to_json())
    if mark.exists() and mark.read_text(encoding="utf-8") != told:
        raise ValueError(f"{out} holds answers of {mark.read_text(encoding='utf-8')}: name another folder for {told}")
    write_atomically(mark, told)
    lines = JsonLines(out / ANSWERS, ("id", "answer", "failed"))
    rows = Attempts(lines, itemgetter("id"), attempts, _failure)
    known = set(rows.load())
    chosen = chosen_questions(cases, asked.limit)
    count = lru_cache(2**14)(lambda text: reader.count((f"{text}\n",))) if asked.counted else word_tokens
    costs = Costs(count, asked.picture)
    with progress("questions", sum(map(len, chosen.values())), len(known)) as advance:
        for n, case in enumerate(cases):
            left = [q for q in chosen[case.id] if q.id not in known]
            if not left:
                continue
            folder = out / "memory" / _name(n, case)
            ask = asking(asked.memory, case, asked.settings, folder, asked.facts, models, costs)
            for start in range(0, len(left), BATCH):
                batch = left[start : start + BATCH]
                made = _answered(batch, ask, reader, asked.tokens, asked.picture)
                rows.add((row["id"], to_json(row, ascii=True)) for row in made)
                for question in batch:
                    advance(question)
    rows.load()
    results = {**asked.to_json(), **summary(list(lines)), "broken_due": len(rows.due)}
    if results["n"] and results["failed"] == results["n"]:
        raise ValueError(f"no results of {out}, {failed_line(results)}")
    write_atomically(out / RESULTS, to_json(results, indent=1))
    return results


def _failure(row: Mapping[str, Any]) -> str:
    """Say why a question has no answer; "" where it has one."""
    return (row.get("error") or "no usable answer") if row["failed"] else ""


def failed_line(results: Mapping[str, Any]) -> str:
    """Say how many answers failed, with the first cause, and how they are asked for again."""
    facts, due = results["broken"], results["broken_due"]
    again = f"; {due} have attempts left: run the same command again" if due else ""
    first = f", the first {facts['first']}" if facts["first"] else ""
    return f"answers that failed: {facts['n']} of {results['n']}{first}{again}"


def _name(n: int, case: Case) -> str:
    return f"{n}-{hashlib.sha256(case.id.encode()).hexdigest()[:8]}"


def chosen_questions(cases: Sequence[Case], limit: int | None) -> dict[str, list[Question]]:
    """Choose `limit` questions, as many of each category as its share of them, the same ones every time."""
    everything = [(case.id, question) for case in cases for question in case.questions]
    if limit is not None and limit < len(everything):
        by_category: dict[str, list[tuple[str, Question]]] = {}
        for pair in everything:
            by_category.setdefault(pair[1].category, []).append(pair)
        place = lambda pair: hashlib.sha256(pair[1].id.encode()).hexdigest()
        everything = [
            pair
            for of in by_category.values()
            for pair in sorted(of, key=place)[: max(1, round(limit * len(of) / len(everything)))]
        ]
    found: dict[str, list[Question]] = {case.id: [] for case in cases}
    for case_id, question in everything:
        found[case_id].append(question)
    return found


def _answered(
    batch: Sequence[Question], ask: Asking, reader: Reader, tokens: int, picture: int
) -> Iterable[dict[str, Any]]:
    """Pack evidence, have it read, and score the answers. The reader sees pack, question and options alone."""
    packs = [ask(question, tokens) for question in batch]
    prompts = [prompt_of(p.texts, q.text, q.options, p.pictures) for p, q in zip(packs, batch, strict=True)]
    started = time.perf_counter()
    answers = reader.answer(prompts)
    seconds = (time.perf_counter() - started) / len(batch)
    liked = reader.liked(prompts, [_right(question) for question in batch])
    for question, pack, got, logprob in zip(batch, packs, answers, liked, strict=True):
        answer = got if isinstance(got, Answer) else None
        text, shown = answer.text if answer else "", shown_of(pack.texts, pack.pictures)
        estimated = Evidence.of(pack.texts, (), Costs(picture=picture), pack.pictures).tokens
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
            "logprob": logprob,
            "pictures": sum(map(len, pack.pictures)),
        }


def _right(question: Question) -> str:
    """Return the answer that is right, as a reader would have to put it."""
    return ABSTAIN if question.absent else question.answer


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up answers: scores by category and over all questions (weighted by questions), with and without those whose
    right answer is to abstain, which stand apart."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    absent, present = [r for r in rows if r["absent"]], [r for r in rows if not r["absent"]]
    mean = lambda of, key: sum(row[key] for row in of) / len(of) if of else None
    interval = lambda values: {key: value for key, value in asdict(bootstrap_mean(values)).items() if key != "stderr"}
    scored = lambda of: {key: interval([row[key] for row in of]) for key in SCORES} if of else None
    liked = [row["logprob"] for row in present if row.get("logprob") is not None]
    total = lambda key: sum(row[key] for row in rows)
    used = {"calls": len(rows), "tokens_in": total("reader_in"), "tokens_out": total("reader_out")}
    return {
        "n": len(rows),
        "failed": sum(row["failed"] for row in rows),
        "broken": broken_facts((row["id"], _failure(row), row.get("broken", ())) for row in rows),
        "by_category": {
            c: {"n": len(of), **(scored(of) or {})}
            for c in categories
            if (of := [row for row in rows if row["category"] == c])
        },
        "overall": scored(rows),
        "overall_without_absent": scored(present),
        "logprob_without_absent": interval(liked) if liked else None,
        "abstention": {"right": mean(absent, "abstained"), "wrong": mean(present, "abstained"), "n": len(absent)},
        "tokens_per_question": mean(rows, "tokens"),
        "word_tokens_per_question": mean(rows, "word_tokens"),
        "pictures_per_question": sum(row.get("pictures", 0) for row in rows) / len(rows) if rows else None,
        "recall": mean([row for row in rows if row["recall"] is not None], "recall"),
        "usage": {"reader": {**used, "seconds": total("seconds")}},
    }


def to_markdown(results: Mapping[str, Any]) -> str:
    heads = ["category", "n", "F1", "BLEU-1", "LoCoMo's score"]
    cell = lambda of: f"{100 * of['mean']:.1f} [{100 * of['low']:.1f}, {100 * of['high']:.1f}]"
    parts = [*results["by_category"].items(), ("all", {"n": results["n"], **(results["overall"] or {})})]
    rows = [[name, str(of["n"]), *(cell(of[key]) for key in SCORES)] for name, of in parts]
    apart = results["abstention"]
    right = "-" if apart["right"] is None else f"{100 * apart['right']:.1f} %"
    by_reader, by_words = results["tokens_per_question"], results["word_tokens_per_question"]
    told = (
        f"abstained where that is right: {right} (n = {apart['n']}); evidence tokens per question: {by_reader:.0f} by "
        f"the reader's tokenizer, {by_words:.0f} estimated; budget: {results['tokens']} "
        f"{'of the reader' if results.get('counted') else 'estimated'}"
    )
    return "\n".join([*markdown_table(heads, rows), "", told, failed_line(results)])
