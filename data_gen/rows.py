"""SFT rows: training examples for compiler (input -> emission) and executor (input -> action) from a teacher's steps.

Rows are stored as a `datasets` dataset (Arrow, pictures as PNG bytes) and read one by one. `SftRow.step_input` gives
training the same input as the agent loop. Filters, statistics and publishing: `data_gen.dataset`.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset as Stored

from agent.records import Episode, StepInput
from compiler.brief_state import parse_brief_state
from compiler.language import Kind, parse, render
from executor.prompt import MemoryBlock, Turn, memory_text
from memory.entry import MemoryEntry, Provenance
from memory.protocol import EntryStore
from memory.trajectory import goal_with_scene, png_bytes
from runtime.checksums import SUMS, check_folder, record_folder
from runtime.pictures import open_picture

if TYPE_CHECKING:
    from datasets import Dataset

TUPLES = ("memory_ids", "memory_texts", "history", "views", "guidances", "reasons", "commands")
PICTURES = ("image", "memory_images")
BATCH = 100  # rows read at a time
Pictures = tuple[tuple[bytes, ...], ...]  # PNG, by entry


@dataclass(frozen=True, slots=True)
class SftRow:
    """One training example: a step of a teacher's episode."""

    task_id: str
    split: str
    family: str
    t: int
    goal: str  # with the scene, as agent and memory state it
    memory_ids: tuple[str, ...]
    memory_texts: tuple[str, ...]
    state: str  # rendered Brief State b_t; "" for a compiler without one
    observation: str
    image: bytes | None  # PNG
    history: tuple[str, ...]
    emission: str  # target of L_text
    action: str  # target of L_action
    success: bool = True  # of the row's episode
    steps: int = 0  # of the row's episode; 0: unknown (rows of an older version)
    memory_images: Pictures = ()  # of each entry; () if no entry has any
    commands: tuple[str, ...] = ()  # possible ones, for executors that see them (`EnvSpec.lists_commands`)
    first: str = ""  # first observation of the episode; "" in rows of an older version
    # Of the steps before this one, with `history`: what the executor saw, and the guidance that it was given; () in
    # rows of an older version.
    views: tuple[str, ...] = ()
    guidances: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    own_scene: bool = True  # whether M held entries of the task's scene; True in rows of an older version
    teacher_level: str = "place"  # what the teacher's guidance says (`teacher_level` of collect)
    environment: str = ""  # name; "" in rows of an older version
    memory_of: str = ""  # the task whose memory is shown, where it is another's (`data_gen.first_states`)

    @property
    def kind(self) -> Kind:
        return parse(self.emission).emission.kind

    @property
    def memory_text(self) -> str:
        return memory_text(self.memory_texts)

    def step_input(self, n_tokens: int = 0) -> StepInput:
        """Return the input of both roles at this step, with the teacher's emission and N empty soft tokens."""
        unknown = Provenance(task_id="", scene="", goal="", split=self.split, success=True)
        images = self.memory_images or ((),) * len(self.memory_ids)
        entries = zip(self.memory_ids, self.memory_texts, images, strict=True)
        memory = [MemoryEntry(id, text, unknown, pictures) for id, text, pictures in entries]
        image = open_picture(self.image).convert("RGB") if self.image else None
        blank = ("",) * len(self.history)
        guided = zip(self.guidances or blank, self.reasons or blank, strict=True)
        past = zip(self.views or blank, self.history, guided, strict=True)
        return StepInput(
            self.goal,
            self.observation,
            image=image,
            admissible=self.commands or None,
            past=tuple(Turn(view, action, MemoryBlock(guidance=g, reason=r)) for view, action, (g, r) in past),
            memory=tuple(memory),
            state=parse_brief_state(self.state) if self.state else None,
            emission=parse(self.emission).emission,
            soft=torch.empty(n_tokens, 0) if n_tokens else None,
            first=self.first,
            environment=self.environment,
        )


def episode_rows(episode: Episode, entries: EntryStore, commands: bool = False) -> list[SftRow]:
    """Convert a teacher's episode into rows, one per step without a failure.

    The action label is the expert's, also at detours.

    Args:
        entries: the bank's entries by id.
        commands: store the possible commands.
    """
    goal, rows = goal_with_scene(episode.goal, episode.scene), []
    for t, step in enumerate(episode.steps):
        if not step.emission_kind or not step.action:
            continue
        memory, past = episode.memory_at(t, entries), episode.steps[:t]
        pictures = tuple(entry.images for entry in memory)
        image = None if step.image is None else png_bytes(step.image)
        rows.append(
            SftRow(
                task_id=episode.task_id,
                split=episode.split,
                family=episode.family,
                t=step.t,
                goal=goal,
                memory_ids=tuple(e.id for e in memory),
                memory_texts=tuple(e.text for e in memory),
                state=step.brief_before,
                observation=step.observation,
                image=image,
                history=tuple(earlier.action for earlier in past),
                emission=step.emission_text,
                action=step.executor_text,
                success=episode.success,
                steps=len(episode.steps),
                memory_images=pictures if any(pictures) else (),
                commands=step.admissible or () if commands else (),
                first=episode.steps[0].observation,
                views=tuple(earlier.observation for earlier in past),
                guidances=tuple(earlier.guidance for earlier in past),
                reasons=tuple(earlier.reason for earlier in past),
                own_scene=any(bool(episode.scene) and e.provenance.scene == episode.scene for e in memory),
            )
        )
    return rows


def continues(row: SftRow, last: SftRow) -> bool:
    """Return whether a row is of the same episode as the row before it: a later step of the task, or another first
    state with the same task's memory."""
    key = lambda of: (of.environment, of.memory_of or of.task_id, bool(of.memory_of))
    return key(row) == key(last) and (row.t > last.t or bool(row.memory_of))


def without_brief_state(row: SftRow) -> SftRow:
    """Convert a row for a compiler without Brief State, which reads previous actions instead of b_t.

    The emission loses its operations; one that does not parse is unchanged.
    """
    parsed = parse(row.emission)
    return replace(row, state="", emission=row.emission if parsed.error else render(replace(parsed.emission, ops=())))


def without_memory_and_text(row: SftRow) -> SftRow:
    """Convert a row for a compiler that makes soft tokens from goal, past commands and view alone (delivery memgen)."""
    bare = replace(row, memory_ids=(), memory_texts=(), memory_images=(), state="", emission="")
    return replace(bare, guidances=(), reasons=(), own_scene=False)


def split_rows(rows: Sequence[SftRow], share: float, seed: int) -> tuple[list[SftRow], list[SftRow]]:
    """Split rows into training and held-out rows by task; seed and task ids alone decide which tasks are held out.

    Raises:
        ValueError: no task is left to train on.
    """
    training, held = split_row_indices([row.task_id for row in rows], share, seed)
    return [rows[i] for i in training], [rows[i] for i in held]


def seeded_order(names: Iterable[str], seed: int) -> list[str]:
    """Return distinct names in a pseudo-random order that depends on seed and names alone."""
    return sorted(set(names), key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())


def split_row_indices(tasks: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the row indices of both parts of `split_rows`, from the task id of every row."""
    if not share:
        return list(range(len(tasks))), []
    names = seeded_order(tasks, seed)
    held = set(names[: max(1, round(share * len(names)))])
    if len(held) == len(names):
        raise ValueError(f"rows of {len(names)} tasks cannot be split by task: collect more, or validation.share=0")
    return [i for i, task in enumerate(tasks) if task not in held], [i for i, task in enumerate(tasks) if task in held]


# -- on disk -----------------------------------------------------------------------------------------------------------


def rows_to_dataset(rows: Sequence[SftRow]) -> Dataset:
    """Convert rows into the dataset that is stored and published."""
    from datasets import Dataset, Features, Image, List, Value

    kinds = {"str": Value("string"), "int": Value("int64"), "bool": Value("bool"), "bytes | None": Image()}
    kinds |= {"tuple[str, ...]": List(kinds["str"]), "Pictures": List(List(Image()))}
    features = Features({field.name: kinds[str(field.type)] for field in fields(SftRow)})
    return Dataset.from_list([asdict(row) for row in rows], features=features)


def save_rows(rows: Sequence[SftRow], folder: Path) -> None:
    """Save rows with their checksums in a folder. Raises: ValueError, if there are none."""
    if not rows:
        raise ValueError("there are no rows to save: no teacher episode succeeded, or the filters dropped all rows")
    (folder / SUMS).unlink(missing_ok=True)  # of rows that a killed process left
    rows_to_dataset(rows).save_to_disk(str(folder))
    record_folder(folder)


def row_folders(rows: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the folders of rows that paths or patterns such as `runs/shard-*/rows` name; matches are sorted.

    Raises:
        FileNotFoundError: a folder holds no rows, or a pattern matches nothing.
    """
    named = [rows] if isinstance(rows, str | Path) else list(rows)
    found: list[Path] = []
    for name in map(str, named):
        matches = [name] if Path(name).exists() else sorted(glob.glob(name))
        for folder in map(Path, matches or [name]):
            if not (folder / "dataset_info.json").is_file():
                raise FileNotFoundError(f"no SFT rows in {folder}: run `memcompiler collect --out {folder.parent}`")
            found.append(folder)
    if not found:
        raise FileNotFoundError("no SFT rows are named: set `rows` to a folder of `memcompiler collect`")
    return list(dict.fromkeys(found))


def load_rows(rows: str | Path | Sequence[str | Path]) -> list[SftRow]:
    """Load all rows of the folders that `row_folders` finds. Raises: ValueError for other datasets."""
    once: dict[bytes, bytes] = {}  # rows share their entries' pictures
    share = lambda row: replace(
        row, memory_images=tuple(tuple(once.setdefault(png, png) for png in entry) for entry in row.memory_images)
    )
    return [share(row) for folder in row_folders(rows) for row in SftRowDataset(folder)]


class SftRowDataset(Stored[SftRow]):
    """The rows of a folder, read from disk on access.

    Args:
        edit: applied to every row.
        pictures: read the rows' pictures.

    Raises:
        ValueError: the folder holds another dataset.
    """

    def __init__(self, folder: Path, edit: Callable[[SftRow], SftRow] | None = None, pictures: bool = True) -> None:
        self._dataset: Any = _open_dataset(folder, () if pictures else PICTURES)  # yields Arrow tables, not dicts
        self._edit = edit or (lambda row: row)

    @property
    def tasks(self) -> list[str]:
        """The task id of every row."""
        return self._dataset.data["task_id"].to_pylist()

    @property
    def has_first_observations(self) -> bool:
        """Whether any row holds the first observation of its episode; rows of an older version do not."""
        return "first" in self._dataset.column_names and any(self._dataset.data["first"].to_pylist())

    @property
    def has_past_views(self) -> bool:
        """Whether rows hold what the executor saw at earlier steps; rows of an older version do not."""
        return "views" in self._dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[SftRow]:
        return (self._edit(_row_of(stored)) for batch in self._dataset.iter(BATCH) for stored in batch.to_pylist())

    def __getitem__(self, index: int) -> SftRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._edit(_row_of(self._dataset[index : index + 1].to_pylist()[0]))


def _open_dataset(folder: Path, without: Collection[str] = ()) -> Dataset:
    from datasets import Dataset

    try:
        check_folder(folder)
        dataset = Dataset.load_from_disk(str(folder))
        dataset.data.table.validate(full=True)  # reading damaged Arrow data crashes the process
    except Exception as error:  # libraries raise various errors on damaged files
        raise ValueError(
            f"the rows in {folder} are damaged ({type(error).__name__}: {error}): collect them again"
        ) from error
    needed = {field.name for field in fields(SftRow) if field.default is MISSING}
    if missing := sorted(needed - set(dataset.column_names)):
        raise ValueError(f"{folder} holds a dataset, but not of SFT rows: it lacks {', '.join(missing)}")
    there = set(dataset.column_names).difference(without)
    dataset = dataset.select_columns([field.name for field in fields(SftRow) if field.name in there])
    return dataset.with_format("arrow")  # undecoded pictures


def _row_of(values: dict[str, Any]) -> SftRow:
    image = values.pop("image", None)
    lists = {name: tuple(values.pop(name, ())) for name in TUPLES}
    png = image["bytes"] if isinstance(image, dict) else image  # rows of an older version hold plain bytes
    pictures = tuple(tuple(one["bytes"] for one in entry) for entry in values.pop("memory_images", ()))
    return SftRow(**{**values, **lists, "image": png, "memory_images": pictures})
