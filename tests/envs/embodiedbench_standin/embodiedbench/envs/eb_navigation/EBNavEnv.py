"""EB-Navigation's call surface: eight moves, success within one metre, no own count of invalid actions."""

from __future__ import annotations

import json
import os

import numpy as np

ValidEvalSets = ["base", "common_sense", "complex_instruction", "visual_appearance", "long_horizon"]
SKILLS = [
    "Move forward by 0.25",
    "Move backward by 0.25",
    "Move rightward by 0.25",
    "Move leftward by 0.25",
    "Rotate to the right by 90 degrees.",
    "Rotate to the left by 90 degrees.",
    "Tilt the camera upward by 30 degrees.",
    "Tilt the camera downward by 30 degrees.",
]


class EBNavigationEnv:
    def __init__(
        self,
        eval_set="base",
        exp_name="test_base",
        down_sample_ratio=1.0,
        fov=100,
        multiview=False,
        boundingbox=False,
        multistep=False,
        resolution=600,
        selected_indexes=(),
    ):
        assert eval_set in ValidEvalSets
        with open(os.path.join(os.path.dirname(__file__), "datasets", f"{eval_set}.json")) as file:
            self.dataset = json.load(file)["tasks"]
        self.resolution, self.number_of_episodes = resolution, len(self.dataset)
        self._reset, self._current_episode_num, self._current_step, self._max_episode_steps = False, 0, 0, 20
        self.episode_language_instruction = ""
        self.language_skill_set = SKILLS

    def reset(self, **kwargs):
        assert self._current_episode_num < self.number_of_episodes
        self.episode_data = self.dataset[self._current_episode_num]
        self.episode_language_instruction = self.episode_data["instruction"]
        self.x = self.episode_data["agentPose"]["position"]["x"]
        self._current_episode_num += 1
        self._current_step, self._reset = 0, True
        return {"head_rgb": self._frame()}

    def step(self, action, reasoning=""):
        assert self._reset, "Reset env before stepping"
        skill = self.language_skill_set[action] if isinstance(action, int) else action
        self._current_step += 1
        self.x += {"Move forward by 0.25": 0.25, "Move backward by 0.25": -0.25}.get(skill, 0.0)
        distance = abs(self.x - self.episode_data["target_position"]["x"])
        reward = float(distance <= 1)
        info = {
            "distance": distance,
            "env_feedback": f"Last action {skill} executed successfully.",
            "instruction": self.episode_language_instruction,
            "env_step": self._current_step,
            "task_success": reward,
            "last_action_success": True,
            "action_id": action,
            "action_description": skill,
        }
        done = bool(reward > 0 or self._current_step >= self._max_episode_steps)
        return {"head_rgb": self._frame()}, reward, done, info

    def close(self):
        self._reset = False

    def _frame(self):
        """Four channels: the last one must not survive."""
        return np.full((self.resolution, self.resolution, 4), 200, dtype=np.uint8)
