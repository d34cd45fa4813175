"""The paper's loop, step by step, for one household task (seconds on a CPU):

    python examples/loop.py                       the expert teacher compiles
    python examples/loop.py out/quickstart/sft    a trained compiler compiles (make quickstart trains one)

The expert fills the memory bank, and the small frozen executor of the repository acts. `agent.episode.run_episode` adds
records, batching and failures.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from agent.expert import ExpertTeacher
from agent.records import EpisodeContext, StepInput, compile_request, executor_request
from compiler.brief_state import BriefState, apply_ops, render_brief_state
from compiler.build import load_compiler
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import filled_bank
from data_gen.tasks import chosen_tasks, specs_for
from envs.registry import Environments, compiler_told, executor_told, reader_of
from executor.build import load_executor
from runtime.progress import quiet


def main(checkpoint: str | None = None, number: int = 14) -> bool:
    """Play test task `number` (14: memory names the place of its plate). Return whether it succeeded."""
    quiet()
    own = [f"compiler.checkpoint={checkpoint or 'null'}", "env.scenes={train: 1, test: 2}"]
    settings = load_config(EvalConfig, "eval/quickstart", own)
    executor = load_executor(settings.executor, executor_told(settings.env))
    compiler = (
        load_compiler(settings.compiler, executor, instructions=compiler_told(settings.env))
        if checkpoint
        else ExpertTeacher(reader=reader_of(settings.env))
    )
    with Environments(settings.env) as envs, tempfile.TemporaryDirectory() as folder:
        tasks, experience = chosen_tasks(settings, envs, "test")
        bank = filled_bank(settings, envs, experience, Path(folder, "run"))
        [spec] = specs_for([tasks[number]], bank, settings.memory.k)  # M = Retrieve(bank, goal), for the whole episode
        env = envs.lease()

    state, history = BriefState(spec.goal), ()  # b_0 holds the goal
    print(f"goal: {spec.goal}\nmemory: {len(spec.memory)} entries")
    observed, success = env.reset(spec.task), False
    first = observed.text
    for t in range(settings.max_steps):
        # Observe: s_t = (o_t, b_t) and M.
        seen = (observed.text, observed.image, observed.admissible)
        step = StepInput(spec.goal, *seen, history, spec.memory, state, first=first)
        # Compile (Eq. 3): guidance and soft tokens for the executor, operations on the Brief State.
        if isinstance(compiler, ExpertTeacher):  # a teacher also gets the expert's plan
            [compiled] = compiler.compile([compile_request(step)], [EpisodeContext(env.expert())])
        else:
            [compiled] = compiler.compile([compile_request(step)])
        step = replace(step, emission=compiled.emission, soft=compiled.soft)
        # Act (Eq. 4): the frozen executor reads the compilation, never M itself.
        [action] = executor.act([executor_request(step, executor)])
        # Apply (Eq. 5): b_{t+1}.
        state, _ = apply_ops(compiled.emission.ops, state)
        # Step.
        transition = env.step(action.action)
        observed, history, success = transition.observation, (*history, action.action), transition.success
        print(f"\n{t}  {compiled.emission.kind}: {compiled.text!r}\n   -> {action.action}\n   {observed.text}")
        if success or transition.done:
            break
    print(f"\nBrief State at the end:\n{render_brief_state(state)}\nsuccess: {success}")
    return success


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
