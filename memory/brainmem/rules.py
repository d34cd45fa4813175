"""The experience agent by rule (L3 and L4), without a language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.command_reader import CommandReader, StepEffect, kind
from memory.brainmem.episodic import Topic
from memory.brainmem.semantic import Experience
from memory.protocol import Trace

LOOP, REFUSED_SHARE = 3, 0.25


def experience(attempts: Sequence[Trace], topic: Topic, id: str, reader: CommandReader) -> Experience:
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
        success_patterns=() if won is None else tuple(filter(None, [pattern(won, topic, reader)])),
        failure_causes=tuple(dict.fromkeys(cause(trace, topic, reader) for trace in lost)),
        learning_insights=tuple(insights(won or attempts[-1], topic, reader)),
    )


def reflection(trace: Trace, topic: Topic, reader: CommandReader) -> str:
    """Summarise an attempt in one sentence (L3)."""
    if trace.success:
        return "; ".join(filter(None, [pattern(trace, topic, reader), *insights(trace, topic, reader)]))
    return cause(trace, topic, reader)


def pattern(trace: Trace, topic: Topic, reader: CommandReader) -> str:
    """Describe the successful manipulation steps by object kinds, without instance numbers."""
    steps = [reader.phrase(done) for done in effects(trace, reader)]
    return f"for {topic.task_type or 'this'}: {', then '.join(steps)}" if steps else ""


def insights(trace: Trace, topic: Topic, reader: CommandReader) -> list[str]:
    """List where objects were found and which appliances worked."""
    where, found = f"in {topic.room} " if topic.room else "", list[str]()
    for done in effects(trace, reader):
        if done.place and done.verb == "take":
            found.append(f"{where}the {reader.in_words(kind(done.thing))} was in {done.place}")
        elif done.place and done.verb in ("heat", "cool", "clean", "slice"):
            found.append(f"{where}{done.place} serves to {done.verb}")
    return list(dict.fromkeys(found))


def cause(trace: Trace, topic: Topic, reader: CommandReader) -> str:
    """Explain a failed attempt by the first matching rule."""
    pairs = Counter((record.observation, record.action) for record in trace.records)
    if pairs and (most := pairs.most_common(1)[0])[1] >= LOOP:
        return f"repeating '{most[0][1]}' where it changes nothing"
    refused = [record.action for record in trace.records if record.refused]
    if trace.records and len(refused) >= REFUSED_SHARE * len(trace.records):
        return f"actions that are not possible, such as '{refused[0]}'"
    seen, gone = set[str](), dict[str, None]()
    for _, reading, state in reader.follow(trace.first, trace.records):
        seen |= {kind(name) for name in (*reading.entities, *state.held, state.at)}
        gone |= {reading.at: None} if reading.at else {}
    if missing := sorted(topic.objects - seen):
        return f"the {missing[0]} was not found in {', '.join(gone) or 'any place'}"
    if max((record.progress for record in trace.records), default=0) > 0:
        return "a step was missing after part of the goal was reached"
    return "the steps ran out"


def effects(trace: Trace, reader: CommandReader) -> list[StepEffect]:
    """List the effects of an attempt's steps."""
    return [done for _, reading, _ in reader.follow(trace.first, trace.records) if (done := reading.effect)]
