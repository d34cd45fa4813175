"""EB-ALFRED's call surface. The toy world: walk to an object, pick it up, walk to a place, put it down.

`at`, `held` and `where` (thing -> place; "" for the floor) are its true state.
"""

from __future__ import annotations

import json
import os

import numpy as np

X_DISPLAY = "1"
HERE = os.path.dirname(__file__)
ValidEvalSets = ["base", "common_sense", "complex_instruction", "spatial", "visual_appearance", "long_horizon"]
SKILLS = [
    "find a Mug",
    "find a ButterKnife",
    "find a Shelf",
    "find a DiningTable",
    "pick up the Mug",
    "pick up the ButterKnife",
    "put down the object in hand",
    "open the Fridge",
    "find a Spoon",
    "find a Cabinet",
    "find a Faucet",
    "pick up the Spoon",
    "drop the object in hand",
    "open the Cabinet",
    "close the Cabinet",
    "turn on the Faucet",
    "turn off the Faucet",
]
START = {"Mug": "DiningTable", "ButterKnife": "DiningTable", "Spoon": "Cabinet"}
PLACES = ("Shelf", "Shelf_2", "DiningTable", "Cabinet")


class EBAlfEnv:
    def __init__(
        self,
        eval_set="base",
        exp_name="",
        down_sample_ratio=1.0,
        selected_indexes=(),
        detection_box=False,
        resolution=500,
    ):
        assert eval_set in ValidEvalSets
        with open(os.path.join(HERE, "data", "splits", "splits.json")) as file:
            self.dataset = json.load(file)[eval_set]
        self.display, self.resolution = X_DISPLAY, resolution
        self.number_of_episodes = len(self.dataset)
        self._reset, self._current_episode_num, self._current_step = False, 0, 0
        self._max_episode_steps, self._cur_invalid_actions, self._max_invalid_actions = 30, 0, 10
        self.episode_language_instruction = ""
        self.language_skill_set = list(SKILLS)

    def reset(self):
        assert self._current_episode_num < self.number_of_episodes
        entry = self.dataset[self._current_episode_num]
        path = os.path.join(HERE, "data", "json_2.1.0", entry["task"], "pp", f"ann_{entry['repeat_idx']}.json")
        with open(path) as file:
            json.load(file)
        print("Restoring scene ...")  # the real one also prints to stdout
        _, self.wanted, _, self.target, _ = entry["task"].split("/")[0].split("-")
        self.episode_language_instruction = entry["instruction"]
        self.at, self.held, self.placed = "", "", False
        self.where, self.open, self.on, self.failed_puts = dict(START), False, False, {}
        self._current_step = self._cur_invalid_actions = 0
        self._current_episode_num += 1
        self._reset = True
        # The real one adds skills for further instances of an object in each scene.
        self.language_skill_set = [*SKILLS, "find a Shelf_2"]
        return {"head_rgb": self._frame()}

    def step(self, action, reasoning=""):
        assert self._reset, "Reset env before stepping"
        if type(action) is int:
            skill = self.language_skill_set[action]
        elif type(action) is str:
            skill = action
        else:
            raise NotImplementedError
        self._current_step += 1
        message = self._act(skill)
        if message:
            self._cur_invalid_actions += 1
        met = [self.placed or self.held == self.wanted, self.placed]
        success = float(all(met))
        over = self._current_step >= self._max_episode_steps or self._cur_invalid_actions >= self._max_invalid_actions
        info = {
            "task_success": success,
            "task_progress": sum(met) / 2,
            "instruction": self.episode_language_instruction,
            "env_step": self._current_step,
            "env_feedback": f"Last action is invalid. {message}" if message else "Last action executed successfully.",
            "last_action_success": float(not message),
            "action_id": action,
            "action_description": skill,
        }
        return {"head_rgb": self._frame()}, success, bool(over or success), info

    def close(self):
        self.display = None

    def _act(self, skill):
        """Empty when it worked, else why it did not."""
        name = skill.split()[-1]
        if skill.startswith("find"):
            self.at = name
        elif skill.startswith("pick up"):
            if self.where.get(name) == "Cabinet" and not self.open:
                return f"{name} is not visible because it is in Cabinet. Go there to pick the object instead."
            if self.held or self.at not in (name, self.where[name]):
                return "Robot is already holding something or is not near the object."
            self.held = name
            del self.where[name]
        elif skill.startswith(("put down", "drop")):
            return self._put(drop=skill.startswith("drop"))
        elif name == "Cabinet":
            if self.open == skill.startswith("open"):
                return "Open action failed." if self.open else "Close action failed."
            self.open = not self.open
        elif name == "Faucet":
            if self.on == skill.startswith("turn on"):
                return "Turn on action failed" if self.on else "Turn off action failed"
            self.on = not self.on
        else:
            return "Object cannot be opened."
        return ""

    def _put(self, drop):
        """Put what is held at what was found last; after three failures at a place, it falls to the floor."""
        if not self.held:
            return "Robot is not holding any object."
        place, message = "" if drop else self.at, ""
        if not drop and (self.at not in PLACES or (self.at == "Cabinet" and not self.open)):
            self.failed_puts[self.at] = self.failed_puts.get(self.at, 0) + 1
            message = f"Putting the object on {self.at} failed. First check whether the receptacle is open or not"
            if self.failed_puts[self.at] < 3:
                return message
            place, message = "", f"{message}. The robot dropped the object instead."
        self.placed = self.held == self.wanted and place == self.target
        self.where[self.held], self.held = place, ""
        return message

    def _frame(self):
        frame = np.zeros((self.resolution, self.resolution, 3), dtype=np.uint8)
        frame[:, :, 0] = 5 * self._current_step
        return frame
