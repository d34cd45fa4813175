"""Reader of EmbodiedBench's task files, which returns dicts with the fields of `envs.base.Task`.

Our Python and EmbodiedBench's import it: standard library and Python 3.9 only. `data_root` has one of two layouts:

| | a checkout of EmbodiedBench | a folder of extracted files |
|---|---|---|
| EB-ALFRED | `embodiedbench/envs/eb_alfred/data/splits/splits.json` | `eb_alfred/splits.json` |
| its annotations (for `train`) | `embodiedbench/envs/eb_alfred/data/json_2.1.0` | `eb_alfred/json_2.1.0` |
| EB-Habitat | pickles: only the simulator's process reads them | `eb_habitat/<split>.json` |
| EB-Navigation | `embodiedbench/envs/eb_navigation/datasets/<split>.json` | `eb_navigation/<split>.json` |
| EB-Manipulation | scene files: only the simulator's process reads them | |
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

SPLITS = {
    "eb_alfred": (
        "base",
        "common_sense",
        "complex_instruction",
        "spatial",
        "visual_appearance",
        "long_horizon",
        "train",
    ),
    "eb_habitat": (
        "base",
        "common_sense",
        "complex_instruction",
        "spatial_relationship",
        "visual_appearance",
        "long_horizon",
        "train",
        "train_validation",
    ),
    "eb_navigation": ("base", "common_sense", "complex_instruction", "visual_appearance", "long_horizon"),
    "eb_manipulation": ("base", "common_sense", "complex", "spatial", "visual"),
}

ALFRED_ANNOTATIONS = "eb_alfred/json_2.1.0", "embodiedbench/envs/eb_alfred/data/json_2.1.0"

# Names of places in EB-Habitat's instructions, which templates replace.
PLACES = re.compile(
    r"\b(?:(?:left|right) (?:kitchen )?counter|(?:brown|black) table|tv stand|sofa|sink|fridge|refrigerator"
    r"|(?:left|right) drawer|cabinet(?: \d+)?)\b"
)


class NoTaskFile(LookupError):
    """No readable file lists the tasks; the running simulator, or more data, can."""


def list_tasks(benchmark: str, split: str, data_root: str) -> list[dict[str, Any]]:
    """List a split in the order of the official files.

    Raises:
        ValueError: the benchmark or split is unknown.
        NoTaskFile: `data_root` holds no readable file of it.
    """
    if benchmark not in SPLITS:
        raise ValueError(f"no benchmark {benchmark!r}; there are: {', '.join(SPLITS)}")
    if split not in SPLITS[benchmark]:
        raise ValueError(f"{benchmark} has no split {split!r}; it has: {', '.join(SPLITS[benchmark])}")
    if benchmark == "eb_manipulation":
        raise NoTaskFile("EB-Manipulation's instructions are in its simulator's scene files")
    if not data_root:
        raise NoTaskFile("no data_root given")
    root = Path(data_root)
    if benchmark == "eb_alfred":
        return _alfred_tasks(root, split)
    if benchmark == "eb_habitat":
        return [habitat_task(episode, split) for episode in _read(root, f"eb_habitat/{split}.json")]
    files = f"eb_navigation/{split}.json", f"embodiedbench/envs/eb_navigation/datasets/{split}.json"
    return [_navigation_task(entry, split, i) for i, entry in enumerate(_read(root, *files)["tasks"])]


def task(
    id: str, goal: str, scene: str, split: str, kind: str, data: dict[str, str], isolation: dict[str, list[str]]
) -> dict[str, Any]:
    """Return the fields of an `envs.base.Task`."""
    return {
        "id": id,
        "goal": goal.strip(),
        "scene": scene,
        "split": split,
        "kind": kind,
        "family": "",
        "data": data,
        "isolation": isolation,
    }


def alfred_task(name: str, repeat: int, instruction: str, split: str) -> dict[str, Any]:
    """Create a task of ALFRED's folder `name`, `<type>-<object>-<movable>-<receptacle>-<floor plan>/<trial>`."""
    episode = f"{name}#{repeat}"
    scene, kind = f"FloorPlan{name.split('/')[0].rsplit('-', 1)[-1]}", name.split("-", 1)[0]
    # These three are the benchmark's entry, with the instruction unchanged.
    data = {"task": name, "repeat_idx": str(repeat), "instruction": instruction}
    return task(episode, instruction, scene=scene, split=split, kind=kind, data=data, isolation={"episode": [episode]})


def _alfred_tasks(root: Path, split: str) -> list[dict[str, Any]]:
    """List a test set, or "train" (paper C.1): every annotation of json_2.1.0 except the test sets' pairs."""
    splits = _read(root, "eb_alfred/splits.json", "embodiedbench/envs/eb_alfred/data/splits/splits.json")
    if split != "train":
        return [alfred_task(e["task"], e["repeat_idx"], e["instruction"], split) for e in splits[split]]
    held_out = {(entry["task"], entry["repeat_idx"]) for entries in splits.values() for entry in entries}
    folder = _first(root, *ALFRED_ANNOTATIONS)
    tasks = []
    for path in sorted(folder.glob("*/*/pp/ann_*.json")):
        name, repeat = "/".join(path.parts[-4:-2]), int(path.stem.split("_")[1])
        if (name, repeat) not in held_out:
            annotations = json.loads(path.read_text(encoding="utf-8"))["turk_annotations"]["anns"]
            tasks.append(alfred_task(name, repeat, annotations[repeat]["task_desc"], "train"))
    if not tasks:
        raise NoTaskFile(f"no <task>/<trial>/pp/ann_<n>.json below {folder}: download the EB-ALFRED data set there")
    return tasks


def alfred_annotation(root: str, name: str, repeat: int) -> dict[str, Any]:
    """Read an annotation, which holds ALFRED's demonstration and the instructions of its annotators."""
    return json.loads(Path(root, ALFRED_ANNOTATIONS[-1], name, "pp", f"ann_{repeat}.json").read_text(encoding="utf-8"))


def habitat_task(episode: dict[str, Any], split: str) -> dict[str, Any]:
    """Create a task from an episode's record in a file or in the running simulator's data set."""
    # v3_sc<apartment>_staging_<furniture>: the layout that persists across episodes
    instruction, layout = episode["instruction"], Path(episode["scene_id"]).name.split(".")[0]
    objects, mark = object_categories(episode), fingerprint(episode)
    return task(
        f"{split}-{mark}",
        instruction,
        scene=layout,
        split=split,
        kind=f"{len(objects)} object{'' if len(objects) == 1 else 's'}",
        data={"eval_set": split, "fingerprint": mark},
        isolation={
            "object": objects,
            "template": [instruction_template(instruction, objects)],
            "scene": [layout.split("_staging")[0]],
        },
    )


def fingerprint(episode: dict[str, Any]) -> str:
    """Hash an episode's content, since EmbodiedBench renumbers and shuffles episodes when it loads them."""
    subgoals = [[str(p) for p in step] for step in episode["subgoals"] or []]
    content = [episode["instruction"], episode["scene_id"], subgoals]
    return hashlib.sha256(json.dumps(content).encode("utf-8")).hexdigest()[:12]


def object_categories(episode: dict[str, Any]) -> list[str]:
    """Return the object categories in the goal or its sampled entities, e.g. ["toy airplane"]."""
    found = {name for name in episode["sampled_entities"].values() if not name.startswith("receptacle_")}
    pending = [episode["goal_preds"]]
    while pending:
        goal = pending.pop()
        found.update(entity["expr_type"] for entity in goal.get("inputs") or [])
        pending += [part for part in goal.get("sub_exprs") or [] if isinstance(part, dict)]
    return sorted(found)


def instruction_template(instruction: str, objects: list[str]) -> str:
    """Replace names of objects and places in an instruction: "move a <object> to the <place>"."""
    text = " ".join(re.findall(r"[a-z0-9'-]+", instruction.lower()))
    for name in sorted(objects, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}s?\b", "<object>", text)
    return re.sub(r"\ban <object>", "a <object>", PLACES.sub("<place>", text))


def _navigation_task(entry: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    start, target = entry["agentPose"]["position"], entry["targetObjectType"]
    return task(
        f"{split}-{index}",
        entry["instruction"],
        scene=entry["scene"],
        split=split,
        kind=f"navigate to {target}",
        data={"entry": json.dumps(entry, sort_keys=True)},
        isolation={"episode": [f"{entry['scene']}#{entry['targetObjectIds']}#{start['x']:.2f},{start['z']:.2f}"]},
    )


def _first(root: Path, *candidates: str) -> Path:
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    raise NoTaskFile(f"{root} holds none of: {', '.join(candidates)}")


def _read(root: Path, *candidates: str) -> Any:
    return json.loads(_first(root, *candidates).read_text(encoding="utf-8"))
