"""Summary of a question-answering run: scores by category, abstention, tokens and failures; as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eval.intervals import bootstrap_mean
from eval.table import markdown_table
from runtime.attempts import failure_counts

SCORES = ("f1", "bleu_1", "locomo")


def failure_reason(row: Mapping[str, Any]) -> str:
    """Return why a question has no answer; "" if it has one."""
    return (row.get("error") or "no usable answer") if row["failed"] else ""


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute scores by category and over all questions, with and without the questions that have no answer, and how
    often the reader abstained."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    absent, present = [r for r in rows if r["absent"]], [r for r in rows if not r["absent"]]
    mean = lambda of, key: sum(row[key] for row in of) / len(of) if of else None
    interval = lambda values: {key: value for key, value in asdict(bootstrap_mean(values)).items() if key != "stderr"}
    scored = lambda of: {key: interval([row[key] for row in of]) for key in SCORES} if of else None
    log_probs = [row["logprob"] for row in present if row.get("logprob") is not None]
    total = lambda key: sum(row[key] for row in rows)
    used = {"calls": len(rows), "tokens_in": total("reader_in"), "tokens_out": total("reader_out")}
    return {
        "n": len(rows),
        "failed": sum(row["failed"] for row in rows),
        "broken": failure_counts((row["id"], failure_reason(row), row.get("broken", ())) for row in rows),
        "by_category": {
            c: {"n": len(of), **(scored(of) or {})}
            for c in categories
            if (of := [row for row in rows if row["category"] == c])
        },
        "overall": scored(rows),
        "overall_without_absent": scored(present),
        "logprob_without_absent": interval(log_probs) if log_probs else None,
        "abstention": {"right": mean(absent, "abstained"), "wrong": mean(present, "abstained"), "n": len(absent)},
        "tokens_per_question": mean(rows, "tokens"),
        "word_tokens_per_question": mean(rows, "word_tokens"),
        "pictures_per_question": sum(row.get("pictures", 0) for row in rows) / len(rows) if rows else None,
        "recall": mean([row for row in rows if row["recall"] is not None], "recall"),
        "usage": {"reader": {**used, "seconds": total("seconds")}},
    }


def failure_line(results: Mapping[str, Any]) -> str:
    """Return one line: how many answers failed, the first cause, and how many have attempts left."""
    facts, due = results["broken"], results["broken_due"]
    again = f"; {due} have attempts left: run the same command again" if due else ""
    first = f", the first {facts['first']}" if facts["first"] else ""
    return f"answers that failed: {facts['n']} of {results['n']}{first}{again}"


def to_markdown(results: Mapping[str, Any]) -> str:
    """Render the scores as a table, with abstention, tokens and failures below."""
    heads = ["category", "n", "F1", "BLEU-1", "LoCoMo's score"]
    cell = lambda of: f"{100 * of['mean']:.1f} [{100 * of['low']:.1f}, {100 * of['high']:.1f}]"
    parts = [*results["by_category"].items(), ("all", {"n": results["n"], **(results["overall"] or {})})]
    rows = [[name, str(of["n"]), *(cell(of[key]) for key in SCORES)] for name, of in parts]
    abstention = results["abstention"]
    right = "-" if abstention["right"] is None else f"{100 * abstention['right']:.1f} %"
    by_reader, by_words = results["tokens_per_question"], results["word_tokens_per_question"]
    facts = (
        f"abstained where that is right: {right} (n = {abstention['n']}); evidence tokens per question: "
        f"{by_reader:.0f} by the reader's tokenizer, {by_words:.0f} estimated; budget: {results['tokens']} "
        f"{'of the reader' if results.get('counted') else 'estimated'}"
    )
    return "\n".join([*markdown_table(heads, rows), "", facts, failure_line(results)])
