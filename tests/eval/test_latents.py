"""Figure 4: soft tokens come back from a record as they were, and the measure of separation can say no."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.records import Episode, StepRecord
from compiler.brief_state import BriefState, render_brief_state
from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest
from eval.paper.latents import (
    SOFT,
    TEXT,
    Recompiled,
    Tokens,
    gathered,
    plane,
    played,
    recompiled,
    separability,
)
from executor.hf import FrozenExecutor
from memory.entry import MemoryEntry
from tests import tiny_models


def step_of(compiler: MemoryCompiler, memory: tuple[MemoryEntry, ...], delivery: str = "compiled") -> Episode:
    """An episode of one step, its compilation recorded as `run_episode` and `to_json` do."""
    episode = Episode("t", "put a mug in cabinet", "home 1", "test", "", "", delivery, 0)
    state = BriefState("in home 1: put a mug in cabinet")
    bare = delivery == "compiled_no_brief"
    [made] = compiler.compile(
        [CompileRequest(state.goal, memory, None if bare else state, "You see a mug 1.", None, ())]
    )
    assert made.mu is not None and made.z is not None
    soft = {
        "n": float(len(made.mu)),
        "mu_norm": made.mu.norm(dim=-1).mean().item(),
        "sigma_mean": 1.0,
        "z_norm": made.z.norm(dim=-1).mean().item(),
    }
    step = StepRecord(0, "You see a mug 1.", None, ("look",), render_brief_state(state), soft=soft)
    step.compilation, step.compiler_prompt_ids, step.emission_ids = made, made.prompt_ids, made.emission_ids
    episode.steps.append(step)
    return episode


@pytest.mark.parametrize("delivery", ["compiled", "compiled_no_brief"])
def test_soft_tokens_come_back(delivery: str) -> None:
    compiler = tiny_models.memory_compiler()
    memory = (tiny_models.entry(1, "in home 1: put a mug in shelf\ngo to shelf 1"),)
    of = step_of(compiler, memory, delivery)
    again = recompiled(compiler, of, 0, memory)
    made = of.steps[0].compilation
    assert again is not None and made is not None and made.soft is not None and not again.drawn
    torch.testing.assert_close(again.soft, made.soft, atol=1e-5, rtol=1e-4)
    assert again.h_soft.shape == (4, 64) and again.h_text.shape == (len(made.emission_ids), 64)


def test_sampled_soft_tokens_are_said_to_be() -> None:
    from compiler.records import Decoding

    compiler = tiny_models.memory_compiler(decoding=Decoding(1.0, 12), projector={"init_log_sigma": 1.0})
    of = step_of(compiler, ())
    again = recompiled(compiler, of, 0, ())
    assert again is not None and again.drawn


def test_another_checkpoint_or_memory_is_an_error() -> None:
    compiler = tiny_models.memory_compiler()
    memory = (tiny_models.entry(1, "go to shelf 1"),)
    of = step_of(compiler, memory)
    with pytest.raises(ValueError, match="prompt is not the recorded one"):
        recompiled(compiler, of, 0, (tiny_models.entry(1, "go to shelf 2"),))
    with torch.no_grad():
        for parameter in compiler.projector.parameters():
            parameter.mul_(1.2)
    with pytest.raises(ValueError, match=r"compiler\.checkpoint is not the run"):
        recompiled(compiler, of, 0, memory)


def test_a_step_without_soft_tokens_has_none() -> None:
    compiler = tiny_models.memory_compiler()
    of = step_of(compiler, ())
    of.steps[0].soft = None
    assert recompiled(compiler, of, 0, ()) is None


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    lines = []
    for task, delivery in rows:
        episode = Episode(task, "x", "", "test", "", "", delivery, 0, steps=[StepRecord(0, "s", None, None, "goal: x")])
        row = episode.to_json()
        if delivery == "compiled":
            row["steps"][0] |= {"compiler_prompt_ids": [1, 2], "emission_ids": [3]}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_records_are_read_by_delivery_and_task(tmp_path: Path) -> None:
    record = write(tmp_path / "e.jsonl", [("a", "static"), ("b", "none"), ("c", "compiled"), ("a", "compiled")])
    found = list(played(record, ("static", "compiled")))
    steps = [(episode.task_id, *episode.steps) for episode in found]
    assert [(task, step.compiler_prompt_ids, step.emission_ids) for task, step in steps] == [
        ("a", (), ()),
        ("c", (1, 2), (3,)),
        ("a", (1, 2), (3,)),
    ]
    assert [episode.delivery for episode in played(record, ("static", "compiled"), limit=1)] == ["static", "compiled"]
    with pytest.raises(ValueError, match="no episode of compiled_text"):
        list(played(record, ("compiled_text",)))
    with pytest.raises(ValueError, match="cells/NAME"):
        list(played(tmp_path / "none.jsonl", ("static",)))
    record.write_text('{"delivery": "static"}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(played(record, ("static",)))


def tokens(apart: float, n: int = 80, seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    kinds = np.repeat([SOFT, TEXT], n)
    vectors = rng.normal(size=(2 * n, 8)) + apart * (kinds == SOFT)[:, None]
    return Tokens(vectors, kinds, np.tile(np.arange(8), 2 * n // 8))


def test_what_lies_apart_is_told_apart_and_what_does_not_is_not() -> None:
    clear, none = separability(tokens(8.0), permutations=30), separability(tokens(0.0), permutations=30)
    assert clear["probe"] == 1.0 and clear["silhouette"] > 0.6 and clear["p_value"] == pytest.approx(1 / 31)
    assert none["probe"] < 0.65 and none["silhouette"] < 0.05 and none["p_value"] > 0.05
    assert 0.4 < clear["permuted_mean"] < 0.6 and clear["chance"] == 0.5


def test_the_same_seed_is_the_same_figure() -> None:
    of = tokens(3.0, n=24)
    assert np.array_equal(plane(of, 1), plane(of, 1)) and plane(of, 1).shape == (48, 2)
    assert separability(of, 1, 5) == separability(of, 1, 5)


def test_tokens_are_distinct_and_as_many_of_each_kind() -> None:
    text = np.repeat(np.arange(12.0)[:, None], 3, axis=1)
    of = Tokens(
        np.concatenate([np.random.default_rng(0).normal(size=(40, 3)), text, text]),
        np.repeat([SOFT, TEXT], [40, 24]),
        np.arange(64) % 4,
    )
    chosen = of.balanced(most=30, seed=0)
    assert (chosen.kinds == SOFT).sum() == (chosen.kinds == TEXT).sum() == 12
    assert len(np.unique(chosen.vectors[chosen.kinds == TEXT], axis=0)) == 12
    assert (of.balanced(10, 0).kinds == TEXT).sum() == 10
    with pytest.raises(ValueError, match="too few"):
        Tokens(of.vectors[:45], of.kinds[:45], of.episodes[:45]).balanced(30, 0)


def test_a_probe_needs_other_episodes() -> None:
    of = tokens(3.0, n=24)
    with pytest.raises(ValueError, match="at least two episodes"):
        separability(Tokens(of.vectors, of.kinds, np.zeros_like(of.episodes)))


def test_text_is_what_the_executor_reads_and_soft_what_it_is_given() -> None:
    backbone = tiny_models.lm_backbone()
    made = [Recompiled(torch.ones(4, 64), torch.zeros(4, 32), torch.full((n, 32), 2.0), False) for n in (3, 1)]
    found = gathered(FrozenExecutor(backbone), [(made[0], "go to shelf 1", 7), (made[1], "", 8)])
    executor, hidden = found["executor"], found["compiler"]
    ids = backbone.tokenizer("go to shelf 1", add_special_tokens=False)["input_ids"]
    table = backbone.model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(executor.vectors[executor.kinds == TEXT], table[ids])
    assert (executor.kinds == SOFT).sum() == 8 and set(executor.episodes[-4:]) == {8}
    assert (hidden.kinds == TEXT).sum() == 4 and hidden.vectors.shape == (12, 32)
