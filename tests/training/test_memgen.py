"""MemGen as a delivery: soft tokens from the state alone, trained by both stages; other compilers are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent.deliveries import Delivery, find
from agent.episode import EpisodeLimits, run_episodes
from compiler import checkpoint
from compiler.client import CompileReply, Timings
from compiler.decoding import Decoder
from compiler.hf import MemoryCompiler
from compiler.records import Compilation
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.training import GrpoConfig, SftConfig
from data_gen.rows import without_memory_and_text
from eval.evaluate import run_eval
from eval.matrix import check_deliveries
from tests import tiny_models
from tests.training.grpo_trainers import PATHWISE, Bandit, LuckyEnv, merged
from tests.training.grpo_trainers import spec as bandit_spec
from tests.training.grpo_trainers import trainer as grpo_trainer
from tests.training.sft_trainers import ROWS, executor, row
from training.rollout import RolloutEngine, samples_of
from training.sft import SftTrainer

MEMGEN = {"text": False, "brief_state": False, "latent": "none", "executor": {"soft_on": "always"}}


def weaver(**settings) -> MemoryCompiler:
    """A tiny compiler that makes eight soft tokens and writes nothing."""
    compiler = tiny_models.memory_compiler(False, n_tokens=8, projector={"kind": "linear"}, **settings)
    compiler.writes_text = False
    return compiler


def sft(folder: Path, **settings) -> SftTrainer:
    rows = [without_memory_and_text(row) for row in ROWS]
    config = SftConfig(**MEMGEN, batch_size=4, micro_batch_size=2, optimizer={"lr": 1e-3}, **settings)
    facts = {"text": False, "brief_state": False}
    return SftTrainer(config, weaver(), executor(), rows, folder, facts)


def refuse_to_decode(*_: object) -> None:
    raise AssertionError("no text is decoded")


def test_soft_tokens_depend_on_the_view_and_not_on_memory_and_no_text_is_decoded(monkeypatch) -> None:
    monkeypatch.setattr(Decoder, "__init__", refuse_to_decode)
    compiler, asked = weaver(), replace(tiny_models.request(0, image=False), memory=(), state=None, history=("look",))
    seen, again, elsewhere = compiler.compile([asked, asked, replace(asked, observation="You see a shelf 9.")])
    assert (seen.text, seen.emission_ids, seen.parse_error, seen.tokens_out) == ("", (), None, 8)
    assert seen.soft is not None and seen.soft.shape == (8, 64)
    assert torch.equal(seen.soft, again.soft) and not torch.allclose(seen.soft, elsewhere.soft)
    alone = compiler.score([compiler.encode(asked)], [()]).gaussian.mu[0]  # the memory tokens follow the prompt
    assert torch.allclose(seen.mu, alone, atol=1e-5)


def test_episodes_show_no_memory_no_state_and_no_guidance(monkeypatch) -> None:
    monkeypatch.setattr(Decoder, "__init__", refuse_to_decode)
    compiler, requests = weaver(), []
    inner = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda asked: (requests.extend(asked), inner(asked))[1])
    engine = RolloutEngine(lambda: LuckyEnv(0), executor(), EpisodeLimits(3))
    [episode] = engine.run(compiler, [bandit_spec(1)], "memgen")
    assert [(r.memory, r.state, r.history) for r in requests] == [
        ((), None, ()),
        ((), None, (episode.steps[0].action,)),
    ]
    assert episode.memory_ids == () and all(step.soft_read and not step.guidance for step in episode.steps)
    assert episode.steps[1].executor_prompt.count("▪") == 8


def test_zero_latents_act_as_the_same_prompt_with_zero_vectors() -> None:
    compiler, acting = weaver(), executor()
    for parameter in compiler.projector.parameters():
        torch.nn.init.zeros_(parameter)
    played = Delivery("memgen", "compiled", compiler, brief_state=False)
    [episode] = run_episodes(
        lambda: LuckyEnv(0),
        [bandit_spec(1).without_memory()],
        delivery=played,
        executor=acting,
        limits=EpisodeLimits(1),
    )
    compiled = episode.steps[0].compilation
    assert compiled is not None and compiled.soft is not None and not compiled.soft.any()
    decision = episode.steps[0].decision
    assert decision is not None and decision.prompt_ids.count(acting.placeholder) == 8


def test_worked_example_the_loss_is_that_of_the_action_s_tokens_alone(tmp_path) -> None:
    """A row's loss is -log p of its action after its view and eight soft tokens, and no other term."""
    trainer = sft(tmp_path, max_steps=1)
    example = trainer.examples[3]
    assert example.emission == () and example.memory_ids == () and example.soft_read
    read = trainer.compiler.backbone.tokenizer.decode(example.prompt.ids)
    assert "did: look ; look ; look" in read and "shelf" not in read  # memory and emission would name the shelf
    trainer.compiler.eval()
    with torch.no_grad():
        gaussian = trainer.compiler.score([example.prompt], [()]).gaussian
        soft = trainer.compiler.projector.to_embeddings(gaussian.mu)
        nll, count = trainer.executor.action_nll([example.executor_prompt], soft, [example.action])
    assert int(count) == len(trainer.executor.action_ids(row(3).action))
    trainer.config = trainer.config.model_copy(update={"label_smoothing": 0.0})
    with torch.no_grad():
        from training.sft_losses import sft_losses

        losses = sft_losses(trainer.compiler, trainer.executor, [example], trainer.config)
    assert set(losses) == {"action"} and losses["action"].item() == pytest.approx(nll.item(), rel=1e-5)


def test_sft_trains_lora_and_projector_through_the_frozen_executor_and_resumes(tmp_path) -> None:
    trainer = sft(tmp_path / "a", max_steps=4, save_every=2)
    before = {n: p.detach().clone() for n, p in trainer.compiler.named_parameters() if p.requires_grad}
    metrics = list(trainer.steps())  # raises if the executor's parameters changed
    assert {name for name in metrics[0] if name.startswith("loss_")} == {"loss_action"}
    moved = {n for n, p in trainer.compiler.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert any("lora_B" in name for name in moved) and any(name.startswith("projector") for name in moved)
    state = checkpoint.read_state(checkpoint.find(tmp_path / "a"))
    assert (state["text"], state["brief_state"]) == (False, False)

    killed = sft(tmp_path / "b", max_steps=4, save_every=2)
    [killed.take_step() for _ in range(3)]  # the third step is not saved
    resumed = sft(tmp_path / "b", max_steps=4, save_every=2)
    assert resumed.resume() and resumed.step == 2
    list(resumed.steps())
    ours, theirs = (dict(t.compiler.named_parameters()) for t in (trainer, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in before)


def test_grpo_learns_from_the_action_alone(tmp_path) -> None:
    """The policy has one token a step: the executor's action."""
    settings = merged(
        PATHWISE, {"delivery": "memgen", "executor": {"soft_on": "always"}, "sampling": {"temperature": 1.0}}
    )
    trainer = grpo_trainer(tmp_path, make_env=Bandit, updates=3, projector="linear", **settings)
    trainer.compiler.writes_text = False
    results = list(trainer.steps())
    assert all(metrics["ratio_latent"] == pytest.approx(1, abs=1e-4) for metrics, _ in results if metrics["samples"])
    groups = next(groups for _, groups in results if any(group.has_variance for group in groups))
    samples = samples_of(groups, trainer.compiler, pathwise=True)
    assert samples and all((s.emission, s.sampled, len(s.rollout_logprobs)) == ((), 0, 1) for s in samples)
    trained = [metrics for metrics, _ in results if metrics["samples"]]
    assert trained and all(metrics["grad_norm"] > 0 for metrics in trained)


def test_a_gated_weaver_makes_nothing_where_the_gate_is_closed() -> None:
    gate = type("Gate", (), {"threshold": 0.5, "__call__": lambda self, request: 0.1})()
    engine = RolloutEngine(lambda: LuckyEnv(0), executor(), EpisodeLimits(3), gate=gate)
    [episode] = engine.run(weaver(), [bandit_spec(1)], "memgen_gated")
    assert [step.soft_read for step in episode.steps] == [True, False]  # the first step is always compiled


def test_checkpoints_of_the_other_kind_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ValueError, match="memgen needs a compiler that was trained with text=false"):
        find("memgen").create(tiny_models.memory_compiler(False), 0)
    with pytest.raises(ValueError, match=r"compiled_text needs a compiler that writes text.*use delivery memgen"):
        find("compiled_text").create(weaver(), 0)
    checkpoint.save_weights(tmp_path, weaver())
    (tmp_path / "state.json").write_text(json.dumps({"text": False}))
    config = EvalConfig(deliveries=("compiled",), compiler={"checkpoint": str(tmp_path)})
    with pytest.raises(ConfigError, match="delivery compiled needs a compiler that writes text"):
        run_eval(config, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"executor\.soft_on=always"):
        check_deliveries(EvalConfig(deliveries=("memgen",)))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set brief_state=false, executor\.soft_on=always, latent=none"):
        SftConfig(text=False)
    with pytest.raises(ValueError, match=r"evaluation\.delivery=memgen"):
        SftConfig(**MEMGEN, validation={"share": 0.5}, evaluation={"tasks": 1})
    with pytest.raises(ValueError, match="soft tokens only"):
        GrpoConfig(delivery="memgen")


def test_a_service_s_reply_without_text_is_no_parse_error() -> None:
    asked = replace(tiny_models.request(0, image=False), memory=(), state=None)
    [compiled] = weaver().compile([asked])
    reply = CompileReply.of(compiled, ("mu", "log_sigma"), emb_std=1.0, seed=None, seconds=Timings(queue=0, compile=0))
    read: Compilation = CompileReply.model_validate_json(reply.model_dump_json()).compilation(asked)
    assert read.parse_error is None and read.emission_ids == () and torch.equal(read.mu, compiled.mu)
