"""Probabilities of commands, and the soft tokens beside an emission that somebody else wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiler.language import Emission
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from play.insight import command_probabilities, compile_as_written, nearest_words, soft_tokens
from tests.fakes import Obedient
from tests.tiny_models import lm_backbone, memory_compiler, request

COMMANDS = ("go to shelf 1", "look")


@pytest.fixture(scope="module")
def executor() -> FrozenExecutor:
    return FrozenExecutor(lm_backbone())


def asked(executor: FrozenExecutor, block: MemoryBlock) -> ExecutorRequest:
    return ExecutorRequest("find mug", block, (), "you see a shelf 1", COMMANDS)


def test_probabilities_are_those_of_the_choice_with_and_without_guidance(executor: FrozenExecutor) -> None:
    guided = asked(executor, MemoryBlock(guidance="go to shelf 1"))
    found = command_probabilities(executor, guided)
    assert found is not None and found.bare is not None and found.given != found.bare
    assert sum(found.given) == pytest.approx(1) and sum(found.bare) == pytest.approx(1)
    [action] = executor.act([guided])
    assert action.confidence == pytest.approx(max(found.given))
    alone = command_probabilities(executor, asked(executor, MemoryBlock()))
    assert alone is not None and alone.bare is None and alone.given == pytest.approx(found.bare)
    assert command_probabilities(executor, replace(guided, admissible=None)) is None
    assert command_probabilities(Obedient(), guided) is None


def test_soft_tokens_beside_a_written_emission_are_those_of_the_compiler(
    executor: FrozenExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = memory_compiler()
    [own] = compiler.compile([request()])
    monkeypatch.setattr(compiler, "emission_ids", lambda text: own.emission_ids)  # a new model writes no emission
    told = compile_as_written(compiler, request(), Emission("go to shelf 1"))
    assert told.text == "> go to shelf 1" and own.soft is not None and told.soft is not None
    torch.testing.assert_close(told.soft, own.soft, atol=1e-5, rtol=1e-4)
    assert [one["norm"] for one in soft_tokens(executor, told)] == pytest.approx(own.mu.norm(dim=-1).tolist(), rel=1e-3)  # type: ignore[union-attr]
    silent = replace(request(), soft_on="guidance")
    assert compile_as_written(compiler, silent, Emission()).soft is None


def test_the_nearest_word_of_an_embedding_is_its_own(executor: FrozenExecutor) -> None:
    ids = [5, 9]
    near = nearest_words(executor, executor.embedding_table[ids].detach())
    assert [words[0][0] for words in near] == [executor.tokenizer.decode([id]) for id in ids]
    assert all(words[0][1] == pytest.approx(1, abs=1e-4) for words in near)
