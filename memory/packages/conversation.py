"""An episode as a conversation, for memory packages that read dialogues."""

from __future__ import annotations

from collections.abc import Sequence

from memory.protocol import Trace
from memory.replies import line
from memory.trajectory import goal_with_scene

LONGEST = 400  # characters of a message

Message = dict[str, str]


def conversation(attempts: Sequence[Trace], steps: int) -> list[Message]:
    """Write the attempts at one task as messages: the user states the goal and what is seen, the agent acts, and the
    last message tells goal and outcome.

    Args:
        steps: most steps of an attempt; of a longer one the first and the last, and a message between them that says
            how many are left out.
    """
    messages, several = list[Message](), len(attempts) > 1
    for n, trace in enumerate(attempts, 1):
        goal = goal_with_scene(trace.task.goal, trace.task.scene)
        number = f"Attempt {n}. " if several else ""
        messages.append(_user(f"{number}Task: {goal}. {trace.first}"))
        messages += _steps(trace, steps)
        reached = "The task was completed" if trace.success else "The task was not completed"
        messages.append(_user(f"{number}{reached}: {goal}"))
    return messages


def _steps(trace: Trace, most: int) -> list[Message]:
    messages, records = list[Message](), trace.records
    head, left_out = (most + 1) // 2, len(records) - most
    for n, record in enumerate(records):
        if left_out > 0 and head <= n < head + left_out:
            if n == head:
                messages.append(_user(f"({left_out} steps are left out)"))
            continue
        refused = "(refused) " if record.refused else ""
        messages.append({"role": "assistant", "content": line(record.action, LONGEST) or "(nothing)"})
        messages.append(_user(f"{refused}{record.feedback}"))
    return messages


def _user(text: str) -> Message:
    return {"role": "user", "content": line(text, LONGEST) or "(nothing)"}
