"""The writer by a language model (S3Mem, App. I, whose text we lack: this prompt is ours), and its anchors. It is shown
raw records alone and must name the records of each unit, so that pointers stay exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from memory.protocol import Trace
from memory.registry import Ask
from memory.s3mem.anchors import MULTI_HOP, Anchor
from memory.s3mem.units import Change, Unit, unit_id
from memory.s3mem.writing import is_dialogue, record_ids, related, sessions
from memory.trajectory import one_line
from runtime.told import json_object, texts

WRITER, ANCHORS = "memory_writer", "memory_anchors"  # roles in the accounts
STEPS, MOST = 20, 3000  # steps of one call, where there are no sessions; tokens of an answer
_WRITE = """Turn the records below into memory units. Answer with one JSON object and nothing else:
{"units": [{"event": what happened, in one sentence that can be read alone, "action": its verb, "objects": [things and \
people], "place": where, "changes": [[key, value before, value after], ...], "record_ids": [ids of the records that \
say so]}, ...]}
Leave out what no record says. Every unit names at least one record."""
_ANCHOR = """What does this question about a history ask for? Answer with one JSON object and nothing else:
{"kind": "event", "state" or "source", "ops": [any of count, compare, between, cause, before, after, first, last, nth, \
when, where, who], "events": [...], "objects": [...], "places": [...], "sources": [who said or did it]}"""


def answers(attempts: Sequence[Trace], ask: Ask) -> dict[str, Any]:
    """Have a model write the units of an episode's attempts: JSON by attempt, and what could not be used, counted."""
    failures, units = Counter[str](), dict[str, list[dict[str, Any]]]()
    for n, trace in enumerate(attempts):
        ids = record_ids(trace)
        units[str(n)] = []
        for part in parts(trace, STEPS):
            shown = "\n".join(f"[{ids[i]}] {shown_record(trace, i)}" for i in part)
            told = _asked(ask, f"{_WRITE}\n\nRecords:\n{shown}", WRITER)
            listed = told.get("units") if told else None
            if not isinstance(listed, list):
                failures["no_units"] += 1
                continue
            known = {ids[i] for i in part}
            for unit in listed:
                cleaned = _cleaned(unit, known, failures)
                units[str(n)] += [cleaned] if cleaned else []
    return {"units": units, "failures": dict(failures)}


def parts(trace: Trace, steps: int) -> list[list[int]]:
    """Cut a history into what one call is shown: a session, or so many steps."""
    rows = range(len(trace.records))
    if is_dialogue(trace):
        numbers = sessions(trace.records)
        return [list(part) for _, part in groupby(rows, key=numbers.__getitem__)]
    return [list(rows[i : i + steps]) for i in range(0, len(rows), steps)]


def shown_record(trace: Trace, i: int) -> str:
    """Write a raw record in one line, as a language model is shown it."""
    record = trace.records[i]
    said = f"{record.actor}: {record.action}" if record.actor else f"{record.action} -> {record.feedback}"
    return one_line(f"({record.when or f'step {record.t}'}) {said}")


def _asked(ask: Ask, text: str, role: str) -> dict[str, Any] | None:
    """Ask for JSON, once more where it cannot be read."""
    for attempt in range(2):
        again = "" if not attempt else "\n\nThe last answer was no JSON object."
        told = ask([{"role": "user", "content": text + again}], role, MOST)
        if (value := json_object(told)) is not None or told is None:  # None: there is no answer to be had
            return value
    return None


def _cleaned(unit: Any, known: set[str], failures: Counter[str]) -> dict[str, Any] | None:
    """Keep what is of the right form; a unit without an event or a record is none."""
    if not isinstance(unit, dict) or not isinstance(unit.get("event"), str) or not unit["event"].strip():
        failures["no_event"] += 1
        return None
    cited = texts(unit.get("record_ids"))
    failures["unknown_record"] += sum(id not in known for id in cited)
    ids = [id for id in cited if id in known]
    if not ids:
        failures["no_record"] += 1
        return None
    listed = unit.get("changes") if isinstance(unit.get("changes"), list) else []
    changes = [list(map(str, each)) for each in listed or [] if isinstance(each, list) and len(each) == 3]
    text = lambda name: unit[name].strip() if isinstance(unit.get(name), str) else ""
    objects = [thing.lower() for thing in texts(unit.get("objects"))]
    return {
        "event": unit["event"].strip(),
        "action": text("action"),
        "objects": objects,
        "place": text("place"),
        "changes": changes,
        "record_ids": list(dict.fromkeys(ids)),
    }


def merged(rules: Sequence[Unit], told: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """Put a model's units in the place of the rules' for the records that they point to."""
    if not told:
        return list(rules)
    by_pointer = {pointer: unit for unit in rules for pointer in unit.pointers}
    cited = {id for each in told for id in each["record_ids"]}
    units = [unit for unit in rules if not cited.issuperset(unit.pointers)]
    for n, each in enumerate(told):
        ids = tuple(each["record_ids"])
        first = by_pointer[ids[0]]
        units.append(
            replace(
                first,
                event=each["event"],
                action=each["action"],
                objects=tuple(each["objects"]),
                place=each["place"] or first.place,
                changes=tuple(Change(*change) for change in each["changes"]),
                relations=(),
                pointers=ids,
                raw=" ".join(by_pointer[id].raw for id in ids),
                id=unit_id(first.origin.history, ids, n, each["event"]),
                pictures=tuple(dict.fromkeys(picture for id in ids for picture in by_pointer[id].pictures)),
            )
        )
    bare = [replace(unit, relations=()) for unit in units]
    return related(sorted(bare, key=lambda unit: (unit.order, unit.id)))


def anchor(question: str, by_rule: Anchor, ask: Ask) -> Anchor:
    """Have a model say what a question is after; by rule what it does not say."""
    told = _asked(ask, f"{_ANCHOR}\n\nQuestion: {question}", ANCHORS)
    if told is None:
        return by_rule
    named = lambda name: tuple(text.lower() for text in texts(told.get(name))) or getattr(by_rule, name)
    ops = frozenset(texts(told.get("ops"))) or by_rule.ops
    kind = told["kind"] if told.get("kind") in ("event", "state", "source") else by_rule.kind
    return replace(
        by_rule,
        kind=kind,
        ops=ops,
        events=named("events"),
        objects=named("objects"),
        places=named("places"),
        sources=named("sources"),
        multi_hop=by_rule.multi_hop or bool(ops & MULTI_HOP),
    )
