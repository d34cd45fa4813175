"""EB-Habitat's call surface, with its wrappers, its shuffled episodes and skills that must be given by number.

`at`, `held` and `where` (thing -> place) are the true state of its toy world.
"""

from __future__ import annotations

import json
import os
import random
from types import SimpleNamespace

import numpy as np

ValidEvalSets = [
    "base",
    "common_sense",
    "complex_instruction",
    "spatial_relationship",
    "visual_appearance",
    "long_horizon",
]
FRIDGE = "refrigerator"
SKILLS = [
    "navigate to the table 1",
    "navigate to the sofa",
    "pick up the ball",
    "place at the sofa",
    "navigate to the refrigerator push point",
    "pick up the toy airplane",
    "place at the table 1",
    "place at the refrigerator push point",
    "open the refrigerator",
    "close the refrigerator",
]


class Core:
    """habitat.Env: the next episode comes from an iterator unless one was chosen."""

    def __init__(self, episodes):
        self._iterator, self._chosen, self._episode = iter(episodes), False, None

    @property
    def current_episode(self):
        return self._episode

    @current_episode.setter
    def current_episode(self, episode):
        self._episode, self._chosen = episode, True

    def reset(self):
        if not self._chosen:
            self._episode = next(self._iterator)
        self._chosen = False


class EBHabEnv:
    def __init__(
        self, eval_set="train", exp_name="", down_sample_ratio=1.0, start_epi_index=0, resolution=600, recording=False
    ):
        assert eval_set in ValidEvalSets
        assert os.path.isdir("embodiedbench"), "the real one finds its scenes from the checkout's folder only"
        # The real one unpickles datasets/<eval_set>.pickle, renumbers the episodes and shuffles them.
        with open(os.path.join(os.path.dirname(__file__), "datasets", f"{eval_set}.json")) as file:
            episodes = [SimpleNamespace(**record) for record in json.load(file)]
        random.Random(3).shuffle(episodes)
        self.dataset = SimpleNamespace(episodes=episodes)
        self.core = Core(episodes)
        self.env = SimpleNamespace(env=SimpleNamespace(env=SimpleNamespace(habitat_env=self.core)))
        self.resolution, self.number_of_episodes = resolution, len(episodes) * down_sample_ratio
        self._reset, self._current_episode_num, self._current_step = False, 0, 0
        self._max_episode_steps, self._cur_invalid_actions, self._max_invalid_actions = 30, 0, 10
        self.episode_language_instruction, self.closed = "", False
        self.language_skill_set = list(SKILLS)

    def reset(self, **kwargs):
        assert self._current_episode_num <= self.number_of_episodes
        self.core.reset()
        self.episode_language_instruction = self.core.current_episode.instruction
        self.episode_data = self.dataset.episodes[self._current_episode_num]
        assert self.episode_data is self.core.current_episode
        self._current_step = self._cur_invalid_actions = 0
        self._current_episode_num += 1
        self._reset, self.at, self.held, self.done = True, "", "", False
        self.where, self.open = {"ball": "table 1", "toy airplane": FRIDGE}, False
        return self._see()

    def step(self, action, reasoning="", **kwargs):
        assert self._reset, "Reset env before stepping"
        self._current_step += 1
        skill = self.language_skill_set[action]
        valid, told = self._act(skill)
        self._cur_invalid_actions += not valid
        over = self._current_step >= self._max_episode_steps or self._cur_invalid_actions >= self._max_invalid_actions
        info = {
            "was_prev_action_invalid": not valid,
            "env_feedback": f"Last action executed successfully{told}." if valid else "Last action is invalid.",
            "env_step": self._current_step,
            "action_id": action,
            "action_description": skill,
            "last_action_success": float(valid),
            "task_success": self.done,
            "task_progress": 1.0 if self.done else 0.5 * (self.held == "ball"),
            "subgoal_reward": 0.0,
        }
        return self._see(), 0.0, bool(over or self.done), info

    def close(self):
        self.closed = True

    def _act(self, skill):
        """Return whether it worked, and what the feedback adds."""
        verb, name = skill.split(" the ")
        name = name.replace(" push point", "")
        reached = name == self.at and (name != FRIDGE or self.open)
        if verb == "navigate to":
            self.at = name
            return True, ""
        if verb == "pick up":
            place = self.where.get(name)
            if self.held or place != self.at or (place == FRIDGE and not self.open):
                return False, ""
            self.held = name
            del self.where[name]
            return True, f" and you are holding {name}"
        if verb == "place at":
            if not self.held or not reached:
                return False, ""
            self.done = self.done or (self.held == "ball" and name == "sofa")
            self.where[self.held], self.held = name, ""
            return True, " and you are holding nothing"
        if name != self.at or self.open == (verb == "open"):
            return False, ""
        self.open = not self.open
        return True, f" and now refrigerator is {'open' if self.open else 'closed'}"

    def _see(self):
        """Floats, one channel: the real sensors' arrays are not always bytes."""
        return {"head_rgb": np.full((self.resolution, self.resolution, 1), 0.5, dtype=np.float32)}
