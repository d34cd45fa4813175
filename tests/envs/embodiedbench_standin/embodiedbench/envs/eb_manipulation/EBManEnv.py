"""EB-Manipulation's call surface: seven numbers an action, a pair from reset, instructions known only after a reset."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

ValidEvalSets = ["base", "common_sense", "complex", "spatial", "visual"]
EPISODES = [("pick_cube_shape", 0, "Pick up the star and put it in the box."), ("stack_cubes_color", 2, "Stack two.")]


class EBManEnv:
    def __init__(
        self,
        eval_set,
        render_mode="human",
        img_size=(600, 600),
        down_sample_ratio=1.0,
        log_path=None,
        selected_indexes=(),
    ):
        assert eval_set in ValidEvalSets
        assert render_mode is None, "no window in a test"
        folder = f"/data/{eval_set}/eval"
        self.dataset = [
            (
                object,
                "task_base.ttm",
                "waypoint_sets.ttm",
                f"{folder}/{kind}/variation{n}/episodes/episode0/c",
                kind,
            )
            for kind, n, _ in EPISODES
        ]
        self.size, self.number_of_episodes = img_size, len(self.dataset)
        self._reset, self._current_episode_num, self._current_step, self._max_episode_steps = False, 0, 0, 15
        self.episode_language_instruction, self.last_frame_obs = "", None

    def reset(self):
        assert self._current_episode_num <= self.number_of_episodes
        self._current_step, self._reset = 0, True
        self._current_episode_num += 1
        self.current_task_variation = self.dataset[self._current_episode_num - 1][-1]
        self.task_class = self.current_task_variation.split("_")[0]
        self.episode_language_instruction = EPISODES[self._current_episode_num - 1][2]
        seen = SimpleNamespace(front_rgb=self._frame(), object_informations={"star": [40, 50, 17]})
        self.last_frame_obs = vars(seen)
        return self.episode_language_instruction, seen

    def step(self, discrete_action):
        assert self._reset and len(discrete_action) == 7
        self._current_step += 1
        reached = discrete_action[:3] == [40, 50, 17]
        info = {
            "env_feedback": f"Last action is valid. The current reward obtained is {float(reached)}.",
            "instruction": self.episode_language_instruction,
            "env_step": self._current_step,
            "action_success": 1.0,
            "task_success": float(reached),
        }
        self.last_frame_obs = {**self.last_frame_obs, "front_rgb": self._frame()}
        return self.last_frame_obs, float(reached), reached or self._current_step >= self._max_episode_steps, info

    def close(self):
        self._reset = False

    def _frame(self):
        return np.full((*self.size, 3), 30, dtype=np.uint8)
