"""Hosts of EmbodiedBench's four environments (commit fc59f55): plain objects that run in EmbodiedBench's Python 3.9.

The module imports only the standard library, EmbodiedBench, numpy and Pillow. An action is the text of a skill or its
number. As in EmbodiedBench's evaluators, any other text counts as an invalid action, costs no environment step, and
ends the episode at the limit of invalid actions.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from envs.embodiedbench import alfred_plan
from envs.embodiedbench import tasks as task_files

START = "The episode begins. The picture shows what the robot sees."
MAX_UNKNOWN_ACTIONS = 10  # in a row, if the environment class does not count them; as in EB-Navigation's evaluator
VOXELS, ANGLES = 100, 120  # EB-Manipulation: largest voxel index, and largest angle in steps of 3 degrees


def host(benchmark: str, **arguments: Any) -> HostedEmbodiedBench:
    """Create the host of one of the four benchmarks; `arguments` are those of `HostedEmbodiedBench`."""
    if benchmark not in BENCHMARKS:
        raise ValueError(f"no benchmark {benchmark!r}; there are: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[benchmark](benchmark, **arguments)


class HostedEmbodiedBench:
    """One simulator of a benchmark, which the first reset starts, and a later one only if its task needs another.

    The defaults are those of EB-ALFRED and EB-Navigation, where one simulator plays every split.

    Args:
        home: the checkout of EmbodiedBench; "": that of the installed package `embodiedbench`.
        data_root: folder of task files; "": the checkout.
        resolution: side of the square picture, in pixels.
    """

    plain = True  # takes and returns dicts, even if `envs.base` can be imported
    module = class_name = ""
    any_eval_set = "base"
    one_for_all_sets = True  # False: each split needs a simulator, which lists its tasks

    def __init__(self, name: str, home: str = "", data_root: str = "", resolution: int = 500) -> None:
        self.name, self.home, self.resolution = name, _checkout(home), resolution
        self.data_root = str(Path(data_root).resolve()) if data_root else self.home
        self.env: Any = None
        self._eval_set = self._extra = ""
        self._unknown, self._success, self._progress, self._done = 0, False, 0.0, True
        self._image: Any = None

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """List a split from files if there are any, otherwise from the simulator (seconds to minutes)."""
        try:
            return task_files.list_tasks(self.name, split, self.data_root)
        except task_files.NoTaskFile as missing:
            if self.one_for_all_sets:
                raise FileNotFoundError(str(missing)) from missing  # a type that the pool re-raises
            self._start(split)
            self._done = True  # listing may have ended a running episode
            return self.list_from_simulator(split)

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        self._start(task["data"].get("eval_set", self.any_eval_set))
        self.select(task)
        pixels = self.env.reset()
        instruction = self.env.episode_language_instruction
        if instruction.strip() != task["goal"]:
            raise RuntimeError(
                f"the simulator started the episode {instruction!r} instead of {task['goal']!r}: the versions of the"
                " task files and of EmbodiedBench's data differ; list the tasks again"
            )
        self._unknown, self._success, self._progress, self._done = 0, False, 0.0, False
        return self._observation(START, pixels)

    def step(self, action: str) -> dict[str, Any]:
        if self._done:
            raise RuntimeError("no episode is running: call reset first")
        skill, pixels = self.skill(action), None
        if skill is None:
            self._done = self._count_invalid()
            text = f"Last action is invalid. {self.why_not(action)}"
        else:
            self._unknown = 0
            pixels, _, done, info = self.env.step(skill)
            self.follow(skill, info)
            success, text = float(info["task_success"]), str(info["env_feedback"])
            self._success, self._done = success > 0, bool(done) or success > 0
            self._progress = min(max(float(info.get("task_progress", 0.0)), success, 0.0), 1.0)
        seen = self._observation(text, pixels)
        return {"observation": seen, "progress": self._progress, "success": self._success, "done": self._done}

    def close(self) -> None:
        if self.env is not None:
            env, self.env, self._eval_set, self._done = self.env, None, "", True
            env.close()

    def _start(self, eval_set: str) -> None:
        if self.env is None or (eval_set != self._eval_set and not self.one_for_all_sets):
            self.close()
            os.chdir(self.home)  # EmbodiedBench finds its scenes relative to its checkout
            self.env, self._eval_set = self.make(eval_set), eval_set

    def _count_invalid(self) -> bool:
        """Count an invalid action; return whether it ends the episode."""
        self._unknown += 1
        if not hasattr(self.env, "_cur_invalid_actions"):
            return self._unknown >= MAX_UNKNOWN_ACTIONS
        self.env._cur_invalid_actions += 1
        return self.env._cur_invalid_actions >= self.env._max_invalid_actions

    def _observation(self, text: str, pixels: Any) -> dict[str, Any]:
        """Build an observation from the environment's `pixels`; None: the last ones."""
        if pixels is not None:
            self._image, self._extra = _picture(self.camera(pixels)), self.extra_text()
        skills = self.skills()
        admissible = None if skills is None else list(dict.fromkeys(skills))
        text = f"{text}\n{self._extra}" if self._extra else text
        return {"text": text, "image": self._image, "admissible": admissible}

    # Overridden by benchmarks ----------------------------------------------------------------------------------

    def make(self, eval_set: str) -> Any:
        return getattr(self.load(), self.class_name)(eval_set=self.any_eval_set, resolution=self.resolution)

    def load(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            what = f"{sys.executable} cannot import {self.module}: {error}"
            raise ImportError(f"{what}; run `memcompiler doctor`") from error

    def select(self, task: dict[str, Any]) -> None:
        """Make `env.reset()` start this task."""
        self.env.dataset, self.env.number_of_episodes, self.env._current_episode_num = [self.entry(task["data"])], 1, 0

    def entry(self, data: dict[str, str]) -> Any:
        raise NotImplementedError

    def list_from_simulator(self, split: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def skills(self) -> list[str] | None:
        return self.env.language_skill_set

    def skill(self, action: str) -> Any:
        return skill_index(action, self.env.language_skill_set)

    def why_not(self, action: str) -> str:
        return f"{action.strip()!r} is not in the list of skills."

    def follow(self, skill: Any, info: dict[str, Any]) -> None:
        """Note the simulator's answer to a skill, for the expert."""

    def camera(self, pixels: Any) -> Any:
        return pixels.get("head_rgb")

    def extra_text(self) -> str:
        return ""


class _Alfred(HostedEmbodiedBench):
    module, class_name = "embodiedbench.envs.eb_alfred.EBAlfEnv", "EBAlfEnv"

    def load(self) -> Any:
        module = super().load()
        if os.environ.get("DISPLAY"):  # the module hard-codes display 1
            module.X_DISPLAY = os.environ["DISPLAY"].rsplit(":", 1)[-1].split(".")[0]
        return module

    def entry(self, data: dict[str, str]) -> Any:
        return {"task": data["task"], "repeat_idx": int(data["repeat_idx"]), "instruction": data["instruction"]}

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        seen = super().reset(task)
        annotation = task_files.alfred_annotation(self.home, task["data"]["task"], int(task["data"]["repeat_idx"]))
        self._plan = alfred_plan.Plan(alfred_plan.interactions(annotation, self._name))
        return seen

    def expert(self) -> list[str] | None:
        """Return what is left of the annotation's demonstration, in skills of this scene (`alfred_plan.Plan`)."""
        left = self._plan.left()
        return left if left is not None and set(left) <= set(self.env.language_skill_set) else None

    def follow(self, skill: Any, info: dict[str, Any]) -> None:
        self._plan.note(self.env.language_skill_set[skill], worked=bool(info["last_action_success"]))
        if "dropped the object" in str(info["env_feedback"]):  # after a third put that failed
            self._plan.note(alfred_plan.DROP)

    def _name(self, object_id: str) -> str:
        """Return the name of an object in the skills: its instance's (Cabinet_2), its parent's (Sink), or its kind."""
        names, parts = getattr(self.env, "id_to_name_dict", None) or {}, object_id.split("|")
        known = names.get(object_id), names.get("|".join(parts[:4])), parts[0]
        return next((name for name in known if name and f"find a {name}" in self.env.language_skill_set), parts[0])


class _Navigation(HostedEmbodiedBench):
    module, class_name = "embodiedbench.envs.eb_navigation.EBNavEnv", "EBNavigationEnv"

    def entry(self, data: dict[str, str]) -> Any:
        return json.loads(data["entry"])


class _Habitat(HostedEmbodiedBench):
    module, one_for_all_sets = "embodiedbench.envs.eb_habitat.EBHabEnv", False

    def make(self, eval_set: str) -> Any:
        module = self.load()
        file = Path(module.__file__).parent / "datasets" / f"{eval_set}.pickle"
        if not file.exists():
            raise FileNotFoundError(f"EB-Habitat has no data set {file}")
        if eval_set not in module.ValidEvalSets:  # lists only test sets, but training sets load, too
            module.ValidEvalSets.append(eval_set)
        return module.EBHabEnv(eval_set=eval_set, resolution=self.resolution)

    def select(self, task: dict[str, Any]) -> None:
        """Find the episode by its content, since habitat shuffles episodes when it loads them."""
        for index, episode in enumerate(self.env.dataset.episodes):
            if task_files.fingerprint(_record(episode)) == task["data"]["fingerprint"]:
                _habitat_core(self.env).current_episode = episode  # habitat's API to choose the next episode
                self.env._current_episode_num = index
                return
        raise RuntimeError(f"EB-Habitat's data set holds no episode {task['id']} ({task['goal']!r})")

    def list_from_simulator(self, split: str) -> list[dict[str, Any]]:
        """List episodes by number, which is the file's order."""
        episodes = sorted(self.env.dataset.episodes, key=lambda episode: int(episode.episode_id))
        return [task_files.habitat_task(_record(episode), split) for episode in episodes]


class _Manipulation(HostedEmbodiedBench):
    """EB-Manipulation, whose actions are x, y, z (voxels), roll, pitch, yaw (steps of 3 degrees) and gripper."""

    module, one_for_all_sets = "embodiedbench.envs.eb_manipulation.EBManEnv", False

    def make(self, eval_set: str) -> Any:
        size = (self.resolution, self.resolution)
        # No render mode: the default opens a window for an unused camera.
        return self.load().EBManEnv(eval_set=eval_set, img_size=size, render_mode=None)

    def select(self, task: dict[str, Any]) -> None:
        self.env._current_episode_num = int(task["data"]["index"])

    def list_from_simulator(self, split: str) -> list[dict[str, Any]]:
        """Load each scene once, since only scene files hold the instructions."""
        listed, env = [], self.env
        for index in range(env.number_of_episodes):
            env._current_episode_num = index
            env.reset()
            kind, files = env.dataset[index][-1], Path(env.dataset[index][3]).parts
            variation, episode = ([part for part in files if part.startswith(p)][-1] for p in ("variation", "episode"))
            listed.append(
                task_files.task(
                    f"{split}-{kind}-{variation}-{episode}",
                    env.episode_language_instruction,
                    scene="",
                    split=split,
                    kind=kind,
                    data={"eval_set": split, "index": str(index)},
                    isolation={"episode": [f"{split}/{kind}/{variation}/{episode}"]},
                )
            )
        return listed

    def skills(self) -> list[str] | None:
        return None

    def skill(self, action: str) -> list[int] | None:
        """Parse "[48, 20, 17, 0, 60, 90, 1]", with or without brackets; None for any other text or range."""
        match = re.fullmatch(r"\D*?(-?\d+(?:\s*,\s*-?\d+){6})\D*", action.strip())
        if not match:
            return None
        numbers = [int(number) for number in match.group(1).split(",")]
        tops = [VOXELS] * 3 + [ANGLES] * 3 + [1]
        return numbers if all(0 <= numbers[i] <= top for i, top in enumerate(tops)) else None

    def why_not(self, action: str) -> str:
        return (
            f"{action.strip()!r} is not seven whole numbers [x, y, z, roll, pitch, yaw, gripper] with places"
            f" in 0-{VOXELS}, angles in 0-{ANGLES} and gripper 0 or 1."
        )

    def camera(self, pixels: Any) -> Any:
        return self.env.last_frame_obs.get("front_rgb")

    def extra_text(self) -> str:
        """List the objects' positions, as the benchmark's prompt does."""
        utilities = importlib.import_module("embodiedbench.envs.eb_manipulation.eb_man_utils")
        seen = copy.deepcopy(self.env.last_frame_obs)  # the function below changes its argument
        places = utilities.form_object_coord_for_input(seen, self.env.task_class, ["front_rgb"])[0]
        listed = ", ".join(f"{name}: [{', '.join(str(int(v)) for v in place)}]" for name, place in places.items())
        return f"Objects at [x, y, z]: {listed}." if listed else ""


BENCHMARKS = {
    "eb_alfred": _Alfred,
    "eb_habitat": _Habitat,
    "eb_navigation": _Navigation,
    "eb_manipulation": _Manipulation,
}


def _checkout(home: str) -> str:
    """Make the package `embodiedbench` importable and return its folder."""
    if home:
        folder = Path(home).resolve()
        if not (folder / "embodiedbench").is_dir():
            raise FileNotFoundError(
                f"{folder} holds no folder 'embodiedbench': set home to a checkout of EmbodiedBench"
            )
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        return str(folder)
    found = importlib.util.find_spec("embodiedbench")
    places = list(found.submodule_search_locations or []) if found else []
    if not places:
        raise ModuleNotFoundError(
            f"{sys.executable} has no package 'embodiedbench': run `pip install -e .` in its checkout with that Python,"
            " or set home to the checkout"
        )
    return str(Path(places[0]).resolve().parent)


def skill_index(action: str, skills: list[str]) -> int | None:
    """Find the skill that a text names exactly, or without case, articles and punctuation, or by number."""
    text = action.strip()
    with contextlib.suppress(ValueError):
        return skills.index(text)
    wanted = _plain(text)
    for index, skill in enumerate(skills):
        if wanted and _plain(skill) == wanted:
            return index
    if text.isdecimal() and int(text) < len(skills):
        return int(text)
    return None


def _plain(text: str) -> str:
    words = re.findall(r"[a-z0-9_]+", text.lower())
    return "".join(word for word in words if word not in ("a", "an", "the"))


def _picture(pixels: Any) -> Any:
    """Convert an array or tensor (height, width, 1, 3 or 4) of bytes or floats in [0, 1] to a PIL image."""
    if pixels is None:
        return None
    import numpy
    from PIL import Image

    array = numpy.asarray(pixels.cpu() if hasattr(pixels, "cpu") else pixels)
    if array.dtype != numpy.uint8:
        array = (array * 255.0).clip(0, 255).astype(numpy.uint8)
    return Image.fromarray(array.repeat(3, axis=2) if array.shape[2] == 1 else array[:, :, :3])


def _habitat_core(env: Any) -> Any:
    """Return habitat's environment inside EmbodiedBench's and gym's wrappers."""
    layer = env.env
    while not hasattr(layer, "habitat_env"):
        if not hasattr(layer, "env"):
            raise RuntimeError("unknown structure of habitat-lab: EmbodiedBench needs version 0.3.0")
        layer = layer.env
    return layer.habitat_env


def _record(episode: Any) -> dict[str, Any]:
    names = ("instruction", "scene_id", "sampled_entities", "goal_preds", "subgoals")
    return {name: getattr(episode, name) for name in names}
