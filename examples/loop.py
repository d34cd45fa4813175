"""The agent loop on the public API, for one household task (under a minute on a CPU):

    python examples/loop.py                       with the small models that ship
    python examples/loop.py out/quickstart/sft    with those of a run (`make quickstart` trains one)

The environment's expert fills the memory bank; then the agent plays the task with memory, and without.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import memcompiler as mc

SCENES = {"train": 1, "test": 1}


def play(agent: mc.Agent, env: mc.Environment, task: mc.Task, max_steps: int = 12) -> bool:
    """Play a task, and return whether it succeeded."""
    observation, success = env.reset(task), False
    agent.begin(task.goal, task.scene, task_id=task.id)
    for t in range(max_steps):
        step = agent.act(observation)  # M, b_t and o_t into guidance and soft tokens, and these into an action
        advice = f"{step.guidance} (because {step.reason})" if step.guidance else "(no guidance)"
        print(f"{t:2}  {advice}\n    -> {step.action}")
        transition = env.step(step.action)
        observation, success = transition.observation, transition.success
        if success or transition.done:
            break
    agent.end(success, observation.text, commit=False)  # True, the default, writes the episode to memory
    return success


def main(name: str = "zoo/alfworld") -> dict[str, bool]:
    """Play the first training task with and without memory; return the success of each."""
    compiler, executor = mc.load(name)
    with tempfile.TemporaryDirectory() as folder, mc.open_environment("household", scenes=SCENES) as envs:
        mc.collect("collect/quickstart", f"env.scenes={SCENES}", out=Path(folder, "collect"))
        memory = mc.open_memory(Path(folder, "collect", "bank"))
        task = envs.tasks("train")[0]
        print(f"\ngoal: {task.goal} in {task.scene}; memory: {len(memory)} entries")
        agents = {
            "with memory": mc.Agent(compiler, executor, memory),
            "without memory": mc.Agent(None, executor, delivery="none"),
        }
        found = {}
        for label, agent in agents.items():
            print(f"\n{label}:")
            found[label] = play(agent, envs.lease(), task)
    print(f"\n{found}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
