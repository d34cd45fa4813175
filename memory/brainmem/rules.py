"""The experience agent by rule (L3 and L4), without a language model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from envs.household.command_reader import PUT, TAKE, TREAT, USE
from envs.household.observation_parser import kind
from memory.brainmem.episodic import Topic
from memory.brainmem.semantic import Experience
from memory.protocol import Record, Trace

LOOP, REFUSED_SHARE = 3, 0.25


def experience(attempts: Sequence[Trace], topic: Topic, id: str) -> Experience:
    """Summarise all attempts at a task: the first success, the causes of failures, and places of objects."""
    won = next((trace for trace in attempts if trace.success), None)
    lost = [trace for trace in attempts if not trace.success]
    return Experience(
        id,
        attempts[0].task.id,
        room=topic.room,
        task_type=topic.task_type,
        objects=topic.objects,
        success=attempts[0].success,
        success_patterns=() if won is None else tuple(filter(None, [pattern(won, topic)])),
        failure_causes=tuple(dict.fromkeys(cause(trace, topic) for trace in lost)),
        learning_insights=tuple(insights(won or attempts[-1], topic)),
    )


def reflection(trace: Trace, topic: Topic) -> str:
    """Summarise an attempt in one sentence (L3)."""
    if trace.success:
        return "; ".join(filter(None, [pattern(trace, topic), *insights(trace, topic)]))
    return cause(trace, topic)


def pattern(trace: Trace, topic: Topic) -> str:
    """Describe the successful manipulation steps by object kinds, without instance numbers."""
    steps = [text for record in executed(trace.records) if (text := _action_phrase(record.action))]
    return f"for {topic.task_type or 'this'}: {', then '.join(steps)}" if steps else ""


def insights(trace: Trace, topic: Topic) -> list[str]:
    """List where objects were found and which appliances worked."""
    where, found = f"in {topic.room} " if topic.room else "", list[str]()
    for record in executed(trace.records):
        if m := TAKE.fullmatch(record.action):
            found.append(f"{where}the {m['thing']} was in {m['place']}")
        elif (m := TREAT.fullmatch(record.action)) and m["place"]:
            found.append(f"{where}{m['place']} serves to {m['verb']}")
    return list(dict.fromkeys(found))


def cause(trace: Trace, topic: Topic) -> str:
    """Explain a failed attempt by the first matching rule."""
    pairs = Counter((record.observation, record.action) for record in trace.records)
    if pairs and (most := pairs.most_common(1)[0])[1] >= LOOP:
        return f"repeating '{most[0][1]}' where it changes nothing"
    refused = [record.action for record in trace.records if record.refused]
    if trace.records and len(refused) >= REFUSED_SHARE * len(trace.records):
        return f"actions that are not possible, such as '{refused[0]}'"
    seen = " ".join(record.feedback for record in trace.records)
    missing = sorted(thing for thing in topic.objects if not re.search(rf"\b{re.escape(thing)} \d", seen))
    if missing:
        gone = dict.fromkeys(r.action.removeprefix("go to ") for r in trace.records if r.action.startswith("go to "))
        return f"the {missing[0]} was not found in {', '.join(gone) or 'any place'}"
    if max((record.progress for record in trace.records), default=0) > 0:
        return "a step was missing after part of the goal was reached"
    return "the steps ran out"


def executed(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.refused]


def _action_phrase(action: str) -> str:
    if m := TAKE.fullmatch(action):
        return f"take the {m['thing']}"
    if m := TREAT.fullmatch(action):
        return f"{m['verb']} the {m['thing']}" + (f" with the {kind(m['place'])}" if m["place"] else "")
    if m := PUT.fullmatch(action):
        return f"put the {m['thing']} in the {m['kind']}"
    if m := USE.fullmatch(action):
        return f"use the {m['thing']}"
    return ""
