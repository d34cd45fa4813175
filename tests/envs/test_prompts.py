"""What executor and compiler are told about every environment: golden files, for any change of them is a change of
results and must be made on purpose (`python -m tests.envs.test_prompts` writes them anew)."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from compiler.prompt import INSTRUCTIONS as LANGUAGE
from compiler.prompt import compiler_instructions, compiler_parts
from compiler.records import CompileRequest
from configs.models import ExecutorConfig
from envs import registry
from envs.embodiedbench.prompts import ALFRED
from envs.spec import INSTRUCTIONS, EnvSpec, ExecutorInstructions
from executor.api import ApiExecutor
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, system_turn
from executor.records import ExecutorView
from lm.prompt import chat_messages, chat_of
from tests import tiny_models

GOLDEN = Path(__file__).parent / "prompts"
ROLES = ("executor", "compiler")
SKILLS = ("find a Mug", "pick up the Mug", "turn on the Faucet")
REQUEST = ExecutorRequest("put a mug", MemoryBlock(), (), "You see a mug 1.", SKILLS)


def prompt(spec: EnvSpec, role: str) -> str:
    """The system turn, with SKILLS for the commands where they are listed."""
    if role == "compiler":
        return compiler_instructions(spec.compiler_instructions)
    return system_turn(spec.executor_instructions.instructions, REQUEST, spec.executor_instructions.lists_commands)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_prompts_are_the_golden_ones(name: str, role: str) -> None:
    assert prompt(registry.find(name), role) + "\n" == (GOLDEN / f"{name}.{role}.txt").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{n}.{r}.txt" for n in registry.BUILT_IN for r in ROLES}


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_executor_is_told_that_one_command_is_the_answer_and_knows_what_commands_are(name: str) -> None:
    told = prompt(registry.find(name), "executor")
    assert "exactly one command" in told and "nothing else" in told
    assert ("The commands:\n" in told) == (name in ("eb_alfred", "eb_habitat", "eb_navigation", "gymnasium"))


@pytest.mark.parametrize("mode", ["choice", "generate"])
def test_choice_and_generation_read_the_same_skills_of_the_scene(mode: Literal["choice", "generate"]) -> None:
    reads = ExecutorView(commands=True)
    executor = FrozenExecutor(tiny_models.lm_backbone(), mode, ALFRED, reads=reads)
    shown = executor.tokenizer.decode(executor.encode(REQUEST).ids)
    assert ALFRED.split("\n")[0] in shown and "\n".join(["The commands:", *SKILLS]) in shown
    other = replace(REQUEST, admissible=("find an Apple",), delivered=MemoryBlock(memory="pick up the Mug"))
    again = executor.tokenizer.decode(executor.encode(other).ids)
    assert "The commands:\nfind an Apple" in again and SKILLS[0] not in again
    unlisted = executor.encode(replace(REQUEST, admissible=None))
    assert "The commands:" not in executor.tokenizer.decode(unlisted.ids)


def test_every_engine_is_told_alike_and_none_means_nothing() -> None:
    closed = ApiExecutor.__new__(ApiExecutor)
    closed.instructions, closed.sees_images, closed.reads = ALFRED, False, ExecutorView(commands=True)
    system, _ = closed.messages(REQUEST)
    assert system == {"role": "system", "content": prompt(registry.find("eb_alfred"), "executor")}
    settings = ExecutorConfig(model="zoo/household/executor", dtype="float32", device="cpu")
    full = load_frozen(settings, registry.find("eb_alfred").executor_instructions)
    assert (full.instructions, full.reads.commands) == (ALFRED, True)
    bare = load_frozen(
        settings.model_copy(update={"instructions": "none"}), registry.find("eb_alfred").executor_instructions
    )
    assert "The commands:" not in bare.tokenizer.decode(bare.encode(REQUEST).ids)


def test_somebody_elses_environment_has_a_sound_default() -> None:
    theirs = EnvSpec("theirs", registry.EnvSettings, lambda _: None, splits=lambda _: None)  # type: ignore[arg-type]
    assert theirs.executor_instructions == ExecutorInstructions(
        INSTRUCTIONS, lists_commands=True
    )  # the text names no command
    assert prompt(theirs, "executor").endswith("\n".join(SKILLS)) and prompt(theirs, "compiler") == LANGUAGE
    assert replace(theirs, instructions="Say: go to box 1.").executor_instructions == ExecutorInstructions(
        "Say: go to box 1.", lists_commands=False
    )


def test_compilers_keep_the_language_and_the_household_is_told_nothing_more() -> None:
    for name in registry.BUILT_IN:
        told = prompt(registry.find(name), "compiler")
        assert told.startswith(LANGUAGE) and (told == LANGUAGE) == (name in ("household", "gymnasium"))
    parts = compiler_parts(CompileRequest("g", (), None, "see"))
    system, _ = chat_messages(chat_of(parts, prompt(registry.find("alfworld"), "compiler")))
    assert "take THING from PLACE" in system["content"]


if __name__ == "__main__":
    for name in registry.BUILT_IN:
        for role in ROLES:
            text = prompt(registry.find(name), role) + "\n"
            (GOLDEN / f"{name}.{role}.txt").write_text(text, encoding="utf-8")
