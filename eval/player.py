"""The player: the one page that shows episodes step by step.

`memcompiler play` serves it, an exported episode is the page with its data in one file that opens offline, and reports
contain it. `episode_view` says what the page knows of an episode. Texts of memories, environments and models are
data: they travel as JSON, and the script writes them as text only."""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from agent.records import Episode, StepRecord, png_base64
from eval.metrics import EMISSION_KINDS, display_name
from eval.plots import family_title
from executor.prompt import memory_text
from runtime.errors import is_failure
from runtime.store import to_json

TEMPLATES = Path(__file__).parent / "templates"
PICTURE_PIXELS = 256  # maximum side of a picture
QUOTED = 4  # words in a row that guidance and an entry must share to count as a citation
_JSON_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


# what the page knows of an episode ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Part of a Brief State line; `change` is "same", "added" or "removed"."""

    change: str
    text: str


class StateLine(NamedTuple):
    """Line of the Brief State, e.g. label `note` with its beliefs as pieces."""

    label: str
    pieces: tuple[Piece, ...]


def episode_view(episode: Episode, extras: Mapping[int, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return what the page shows of an episode, ready for JSON.

    Args:
        extras: by step, what records do not hold: soft tokens one by one, probabilities of commands, what the visitor
            did.
    """
    texts = entry_texts(episode)
    return {
        "task": task_view(episode),
        "delivery": episode.delivery,
        "label": display_name(episode.delivery),
        "outcome": outcome(episode),
        "stop_reason": str(episode.stop_reason),
        "progress": episode.progress,
        "seed": episode.seed,
        "error": episode.error,
        "bank_version": episode.bank_version,
        "memory": texts,
        "memory_text": "" if texts else episode.memory_text,
        "kinds": [kind for kind in EMISSION_KINDS if any(step.emission_kind == kind for step in episode.steps)],
        "parse_errors": sum(step.parse_error is not None for step in episode.steps),
        "steps": [view | dict((extras or {}).get(view["t"], {})) for view in _step_views(episode, texts)],
    }


def task_view(episode: Episode) -> dict[str, str]:
    """Return the facts about an episode's task."""
    return {
        "id": episode.task_id,
        "goal": episode.goal,
        "scene": episode.scene,
        "kind": episode.kind,
        "family": episode.family,
        "family_title": family_title(episode.family) if episode.family else "",
        "split": episode.split,
    }


def outcome(episode: Episode) -> str:
    """Return "broken" (a technical failure), "success" or "failure"."""
    if is_failure(episode.stop_reason):
        return "broken"
    return "success" if episode.success else "failure"


def entry_texts(episode: Episode) -> dict[str, str]:
    """Return the texts of the entries that the record holds, by id.

    A record holds the first step's entries as one text. It is divided only where the division is certain.
    """
    texts = {id: entry.text for id, entry in episode.made.items()}
    parts = episode.memory_text.split(memory_text(["", ""]))
    if len(parts) == len(episode.memory_ids):
        texts = dict(zip(episode.memory_ids, parts, strict=True)) | texts
    return texts


def cited(step: StepRecord, ids: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Return the entries that a step's guidance cites: those that contain its reason, else those that share the longest
    run of words with reason or guidance, of `QUOTED` words at least."""
    if not step.guidance:
        return []
    known = {id: _words(texts[id]) for id in ids if id in texts}
    if (reason := _words(step.reason)) and (whole := [id for id, text in known.items() if _within(reason, text)]):
        return whole
    shared = {
        id: max(_shared(text, _words(said)) for said in (step.reason, step.guidance)) for id, text in known.items()
    }
    most = max(shared.values(), default=0)
    return [id for id, words in shared.items() if words == most] if most >= QUOTED else []


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _within(words: Sequence[str], text: Sequence[str]) -> bool:
    return f" {' '.join(words)} " in f" {' '.join(text)} "


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest run of words that both texts contain."""
    return difflib.SequenceMatcher(a=a, b=b, autojunk=False).find_longest_match().size


def _step_views(episode: Episode, texts: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    steps, known = episode.steps, set(episode.memory_ids)
    answer, compiles = None, any(step.emission_kind for step in steps)
    for step in steps:
        ids = episode.memory_ids if step.memory_ids is None else step.memory_ids
        fresh, known = [id for id in ids if id not in known], set(ids)
        # the step of a technical failure has no state after it
        state = diff_state(step.brief_before, step.brief_after or step.brief_before)
        yield {
            "t": step.t,
            "observation": step.observation,
            "seen_before": step.observation == answer,  # equal to the last feedback
            "picture": _picture(step.image),
            "recalled": list(ids),
            "fresh": fresh,
            "cited": cited(step, ids, texts),
            "state": state if compiles else [],  # without a compiler it is only the goal
            "changed": any(piece.change != "same" for line in state for piece in line.pieces),
            "emission": step.emission_text,
            "kind": step.emission_kind,
            "guidance": step.guidance,
            "reason": step.reason,
            "parse_error": step.parse_error,
            "op_errors": list(step.op_errors),
            "gate": step.gate_probability,
            "confidence": step.confidence,
            "soft": dict(step.soft) if step.soft else None,
            "soft_read": step.soft_read,
            "prompt": step.executor_prompt,
            "commands": list(step.admissible) if step.admissible is not None else None,
            "action": step.action,
            "grounding": step.grounding,
            "wrote": step.executor_text if step.executor_text != step.action else "",
            "feedback": step.feedback,
            "progress": step.progress,
            "seconds": dict(step.seconds),
            "tokens": dict(step.tokens),
        }
        answer = step.feedback


def diff_state(before: str, after: str) -> list[StateLine]:
    """Compare two Brief States: match lines by label, then compare their items."""
    old, new = ([_split_line(line) for line in text.splitlines()] for text in (before, after))
    matcher = difflib.SequenceMatcher(a=[label for label, _ in old], b=[label for label, _ in new], autojunk=False)
    lines: list[StateLine] = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(old[i:j], new[k:m], strict=True)
            lines += [StateLine(label, _diff_items(was, now)) for (label, was), (_, now) in pairs]
            continue
        lines += [StateLine(label, _diff_items(was, [])) for label, was in old[i:j]]
        lines += [StateLine(label, _diff_items([], now)) for label, now in new[k:m]]
    return lines


def _split_line(line: str) -> tuple[str, list[str]]:
    """`note: a = 1 ; b = 2` -> ("note", ["a = 1", "b = 2"])"""
    label, mark, body = line.partition(": ")
    return (label, body.split(" ; ")) if mark else ("", [line])


def _diff_items(was: Sequence[str], now: Sequence[str]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(a=was, b=now, autojunk=False).get_opcodes():
        parts = [("same", was[i:j])] if tag == "equal" else [("removed", was[i:j]), ("added", now[k:m])]
        pieces += [Piece(change, " ; ".join(items)) for change, items in parts if items]
    return tuple(pieces)


def _picture(image: Image.Image | None) -> dict[str, Any] | None:
    if image is None:
        return None
    if max(image.size) > PICTURE_PIXELS or image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    return {"data": png_base64(image), "width": image.width, "height": image.height}


# the page -------------------------------------------------------------------------------------------------------------


def templates() -> Environment:
    """Create the template environment. Autoescape is set for all files: jinja2 would leave `.j2` unescaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def script_json(value: object) -> Markup:
    """Write a value as JSON inside a script element: no text can end the element or become markup."""
    return Markup(to_json(value, ascii=True).translate(_JSON_ESCAPES))


def source_of(name: str) -> Markup:
    """Return our own style sheet or script, to be written into a page."""
    return Markup(TEMPLATES.joinpath(name).read_text(encoding="utf-8"))


def content_policy(style: str, script: str, connect: str = "'none'") -> str:
    """Return a content security policy that loads nothing and allows only our own style and script, by their hashes.

    Args:
        connect: what the script may ask: nothing, or the server of the page ('self').
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def task_json(episodes: Sequence[Episode]) -> Markup:
    """Write the episodes of one task, with all steps, as JSON for the page."""
    views = [episode_view(episode) for episode in episodes]
    return script_json({"task": task_view(episodes[0]), "episodes": views})


def player_page(views: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write the page as one file: with an exported task's `episode_view`s, which opens offline, or without any, to be
    served by `memcompiler play`."""
    style, script = source_of("player.css"), source_of("player.js")
    if not views:
        script += source_of("play.js")
    data: dict[str, Any] = {"live": not views, "kinds": EMISSION_KINDS, "tasks": []}
    if views:
        data["tasks"] = [{"task": views[0]["task"], "episodes": list(views)}]
    return (
        templates()
        .get_template("player.html.j2")
        .render(
            style=style,
            script=script,
            policy=content_policy(style, script, "'none'" if views else "'self'"),
            data=script_json(data),
            title=views[0]["task"]["goal"] if views else "watch and play",
        )
    )
