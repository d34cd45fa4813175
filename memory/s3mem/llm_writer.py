"""Units and anchors written by a language model (S3Mem, App. I; the prompts are ours, for the paper omits them).

The model reads raw records only and must cite the records of each unit, so that pointers stay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from memory.protocol import Trace
from memory.registry import ChatFunction
from memory.s3mem.anchors import MULTI_HOP, Anchor
from memory.s3mem.rule_writer import add_relations, is_dialogue, record_ids, session_numbers
from memory.s3mem.units import EventUnit, StateChange, unit_id
from memory.trajectory import one_line
from runtime.parsing import parse_json_object, strings_in

WRITER, ANCHORS = "memory_writer", "memory_anchors"  # roles in the endpoint's account
STEPS, MAX_TOKENS = 20, 3000  # steps of one call, for histories without sessions; tokens of an answer
_WRITE = """Turn the records below into memory units. Answer with one JSON object and nothing else:
{"units": [{"event": what happened, in one sentence that can be read alone, "action": its verb, "objects": [things and \
people], "place": where, "changes": [[key, value before, value after], ...], "record_ids": [ids of the records that \
say so]}, ...]}
Leave out what no record says. Every unit names at least one record."""
_ANCHOR = """What does this question about a history ask for? Answer with one JSON object and nothing else:
{"kind": "event", "state" or "source", "ops": [any of count, compare, between, cause, before, after, first, last, nth, \
when, where, who], "events": [...], "objects": [...], "places": [...], "sources": [who said or did it]}"""


def write_units_json(attempts: Sequence[Trace], ask: ChatFunction) -> dict[str, Any]:
    """Have a model write the units of an episode's attempts; return JSON by attempt, with counts of failures."""
    failures, units = Counter[str](), dict[str, list[dict[str, Any]]]()
    for n, trace in enumerate(attempts):
        ids = record_ids(trace)
        units[str(n)] = []
        for part in split_history(trace, STEPS):
            shown = "\n".join(f"[{ids[i]}] {format_record(trace, i)}" for i in part)
            answer = _request_json(ask, f"{_WRITE}\n\nRecords:\n{shown}", WRITER)
            listed = answer.get("units") if answer else None
            if not isinstance(listed, list):
                failures["no_units"] += 1
                continue
            known = {ids[i] for i in part}
            for unit in listed:
                valid = _validate_unit(unit, known, failures)
                units[str(n)] += [valid] if valid else []
    return {"units": units, "failures": dict(failures)}


def split_history(trace: Trace, steps: int) -> list[list[int]]:
    """Split a history's record indices into parts for one call each: a session of a dialogue, or `steps` steps."""
    rows = range(len(trace.records))
    if is_dialogue(trace):
        numbers = session_numbers(trace.records)
        return [list(part) for _, part in groupby(rows, key=numbers.__getitem__)]
    return [list(rows[i : i + steps]) for i in range(0, len(rows), steps)]


def format_record(trace: Trace, i: int) -> str:
    """Return a raw record as one line of a prompt."""
    record = trace.records[i]
    text = f"{record.actor}: {record.action}" if record.actor else f"{record.action} -> {record.feedback}"
    return one_line(f"({record.when or f'step {record.t}'}) {text}")


def _request_json(ask: ChatFunction, text: str, role: str) -> dict[str, Any] | None:
    """Request a JSON object; repeat once if the answer is none."""
    for attempt in range(2):
        again = "" if not attempt else "\n\nThe last answer was no JSON object."
        answer = ask([{"role": "user", "content": text + again}], role, MAX_TOKENS)
        if (value := parse_json_object(answer)) is not None or answer is None:  # None: the endpoint has failed
            return value
    return None


def _validate_unit(unit: Any, known: set[str], failures: Counter[str]) -> dict[str, Any] | None:
    """Return a unit's well-formed fields; None, and a count in `failures`, without an event or a known record."""
    if not isinstance(unit, dict) or not isinstance(unit.get("event"), str) or not unit["event"].strip():
        failures["no_event"] += 1
        return None
    cited = strings_in(unit.get("record_ids"))
    failures["unknown_record"] += sum(id not in known for id in cited)
    ids = [id for id in cited if id in known]
    if not ids:
        failures["no_record"] += 1
        return None
    listed = unit.get("changes") if isinstance(unit.get("changes"), list) else []
    changes = [list(map(str, each)) for each in listed or [] if isinstance(each, list) and len(each) == 3]
    text = lambda name: unit[name].strip() if isinstance(unit.get(name), str) else ""
    objects = [thing.lower() for thing in strings_in(unit.get("objects"))]
    return {
        "event": unit["event"].strip(),
        "action": text("action"),
        "objects": objects,
        "place": text("place"),
        "changes": changes,
        "record_ids": list(dict.fromkeys(ids)),
    }


def merge_units(rules: Sequence[EventUnit], written: Sequence[Mapping[str, Any]]) -> list[EventUnit]:
    """Replace the rule-written units of the records that a model's units cite."""
    if not written:
        return list(rules)
    by_pointer = {pointer: unit for unit in rules for pointer in unit.pointers}
    cited = {id for each in written for id in each["record_ids"]}
    units = [unit for unit in rules if not cited.issuperset(unit.pointers)]
    for n, each in enumerate(written):
        ids = tuple(each["record_ids"])
        first = by_pointer[ids[0]]
        units.append(
            replace(
                first,
                event=each["event"],
                action=each["action"],
                objects=tuple(each["objects"]),
                place=each["place"] or first.place,
                changes=tuple(StateChange(*change) for change in each["changes"]),
                relations=(),
                pointers=ids,
                raw=" ".join(by_pointer[id].raw for id in ids),
                id=unit_id(first.origin.history, ids, n, each["event"]),
                pictures=tuple(dict.fromkeys(picture for id in ids for picture in by_pointer[id].pictures)),
            )
        )
    bare = [replace(unit, relations=()) for unit in units]
    return add_relations(sorted(bare, key=lambda unit: (unit.order, unit.id)))


def parse_with_model(question: str, by_rule: Anchor, ask: ChatFunction, failures: Counter[str]) -> Anchor:
    """Have a model parse a question; fields that it omits come from the rules. An unusable parse is counted."""
    answer = _request_json(ask, f"{_ANCHOR}\n\nQuestion: {question}", ANCHORS)
    if answer is None:
        failures[ANCHORS] += 1
        return by_rule
    named = lambda name: tuple(text.lower() for text in strings_in(answer.get(name))) or getattr(by_rule, name)
    ops = frozenset(strings_in(answer.get("ops"))) or by_rule.ops
    kind = answer["kind"] if answer.get("kind") in ("event", "state", "source") else by_rule.kind
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
