"""Questions about histories, as training, the runner and every measurement of evidence read them, whatever they come
from."""

from __future__ import annotations

from dataclasses import dataclass

from memory.protocol import Trace


@dataclass(frozen=True, slots=True)
class Question:
    """`evidence`: ids of the records that answer it, in the order in which they are read; () where nobody says.
    `options`: between which is chosen, if any; `absent`: the right answer is that the histories do not say. `anchors`
    and `links`, of template questions alone: the records that ground it, and which is read because of which."""

    id: str
    text: str
    answer: str
    category: str = ""
    evidence: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    absent: bool = False
    anchors: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Histories that are kept in one memory, and the questions about them. `facts`: what somebody has noted of the
    records, one history more that points to them by their ids; for those who read notes in their place."""

    id: str
    histories: tuple[Trace, ...]
    questions: tuple[Question, ...]
    facts: tuple[Trace, ...] = ()
