"""SFT: gradients reach LoRA and projector, never the executor; splitting a batch changes nothing; resume is exact."""

from dataclasses import replace

import pytest
import torch

from compiler import checkpoint
from configs.load import ConfigError
from configs.training import SftConfig
from data_gen.rows import load_rows, save_rows
from executor.records import PAPER_VIEW
from tests import tiny_models
from tests.training.sft_trainers import ROWS, executor, trainable, trainer
from training.losses import cosine_with_warmup, token_nll
from training.sft import train_sft
from training.sft_data import encode_row
from training.sft_losses import sft_losses


def test_token_nll_by_hand():
    # two classes, logits (0, log 3): p = (1/4, 3/4). Target 1, smoothing 0.2:
    # 0.8 * -log(3/4) + 0.2 * mean(-log(1/4), -log(3/4)) = 0.9 * 0.287682 + 0.1 * 1.386294
    logits = torch.tensor([0.0, 3.0]).clamp(min=1).log().expand(2, 1, 2)
    total, count = token_nll(logits, torch.tensor([[1], [1]]), torch.tensor([[1], [0]]), smoothing=0.2)
    assert total[0].item() == pytest.approx(0.9 * 0.2876821 + 0.1 * 1.3862944, abs=1e-5)
    assert total[1].item() == 0 and count.tolist() == [1, 0]


def test_schedule_by_hand():
    rates = [cosine_with_warmup(s, 12, warmup=2 / 12) for s in (0, 1, 2, 7, 12)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("latent", ["gauss_nll", "soft_mse", "lm_head", "none"])
def test_gradients_reach_lora_and_projector_never_the_executor(tmp_path, latent):
    t = trainer(tmp_path, latent=latent)
    torch.manual_seed(0)
    losses = sft_losses(t.compiler, t.executor, [t.examples[i] for i in range(3)], t.config)
    assert set(losses) == {"text", "action", "entropy", "orth"} | ({"latent"} if latent != "none" else set())
    losses["action"].sum().backward()  # the action loss alone must reach both, through the frozen executor
    assert all(p.grad is None for p in t.executor.model.parameters())
    names = {n for n, p in t.compiler.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert "projector.linear.weight" in names
    assert any("lora_B" in n for n in names)
    assert all("lora_" in n or n.startswith("projector") for n in names)


def test_training_lowers_the_loss_and_leaves_the_executor_alone(tmp_path):
    t = trainer(tmp_path, max_steps=12, optimizer={"lr": 5e-3})
    before = t.executor.hash()
    history = []
    history += t.steps()
    assert history[-1]["loss"] < history[0]["loss"] - 1
    assert t.executor.hash() == before
    for key in ("loss_text", "loss_action", "loss_entropy", "loss_latent", "loss_orth", "lr", "grad_norm", "tokens"):
        assert key in history[0]


def test_examples_are_kept_while_there_is_room_for_their_tokens_and_pictures(tmp_path, monkeypatch):
    t = trainer(tmp_path)
    one = t.examples[0]
    read = (one.prompt.ids, one.executor_prompt.ids, one.memory_ids, one.emission, one.action)
    pixels = 64 * 3 * 2 * 8 * 8
    assert one.prompt.pictures[0].values == pixels and one.size == pixels + 8 * sum(map(len, read))
    assert t.examples[0] is one
    monkeypatch.setattr("training.sft_data.MAX_CACHED_VALUES", one.size + 8 * 1000)
    assert t.examples[2] is not t.examples[2] and t.examples[0] is one
    assert t.examples[1] is t.examples[1]  # it has no picture


def test_micro_batches_do_not_change_the_step(tmp_path):
    def gradients(size: int) -> dict[str, torch.Tensor]:
        t = trainer(tmp_path / str(size), micro_batch_size=size, label_smoothing=0.0)
        t.compiler.eval()  # no dropout
        t.compiler.projector.draw = lambda g, *a: g.mu  # no noise: it would be drawn in another order
        losses = [
            sft_losses(t.compiler, t.executor, [t.examples[i] for i in part], t.config)
            for part in ([range(4)] if size == 4 else [[i] for i in range(4)])
        ]
        tokens = {
            "text": sum(len(t.examples[i].emission) for i in range(4)),
            "action": sum(len(t.examples[i].action) for i in range(4)),
        }
        sum(v.sum() / tokens.get(k, 4) for part in losses for k, v in part.items()).backward()
        return {n: p.grad for n, p in t.compiler.named_parameters() if p.grad is not None}

    one, four = gradients(1), gradients(4)
    for name in four:
        torch.testing.assert_close(one[name], four[name], atol=1e-5, rtol=1e-3)


def test_resume_continues_to_the_same_weights(tmp_path):
    whole = trainer(tmp_path / "whole")
    list(whole.steps())
    part = trainer(tmp_path / "part")
    steps = part.steps()
    for _ in range(3):  # killed after step 3: the checkpoint is that of step 2
        next(steps)
    again = trainer(tmp_path / "part")
    assert again.resume() and again.step == 2
    list(again.steps())
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


def test_a_checkpoint_of_other_rows_is_refused(tmp_path):
    list(trainer(tmp_path, max_steps=2).steps())
    with pytest.raises(checkpoint.CheckpointError, match="rows"):
        trainer(tmp_path, rows=ROWS[:3]).resume()


def test_corrupt_checkpoints_give_clear_errors(tmp_path):
    t = trainer(tmp_path, max_steps=2)
    list(t.steps())
    found = checkpoint.find(tmp_path)
    (found / "projector.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(checkpoint.CheckpointError, match="projector"):
        checkpoint.load(found, t.compiler)
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.find(tmp_path / "nowhere")


def test_equal_adapters_are_equal_files(tmp_path):
    """PEFT keeps the names of modules in a set, whose order differs between processes, and with it a file's hash."""
    compiler = trainer(tmp_path).compiler
    config = compiler.policy.peft_config["default"]
    names = sorted(config.target_modules)
    for n, order in enumerate((names, names[::-1])):
        config.target_modules = order
        checkpoint.save_weights(tmp_path / str(n), compiler)
    assert len(names) > 1 and checkpoint.sha256(tmp_path / "0") == checkpoint.sha256(tmp_path / "1")


def test_a_checkpoint_for_another_model_is_refused(tmp_path):
    list(trainer(tmp_path, max_steps=2).steps())
    other = tiny_models.memory_compiler(False)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(checkpoint.find(tmp_path), other)


def test_only_the_newest_checkpoints_are_kept_and_nothing_is_pickled(tmp_path):
    list(trainer(tmp_path, keep=1).steps())
    kept = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert [p.name for p in kept] == ["step-000006"]
    assert {p.suffix for p in kept[0].rglob("*") if p.is_file()} <= {".safetensors", ".json", ".md", ""}


def test_executor_prompt_of_a_row_holds_n_placeholders():
    compiler, model = tiny_models.memory_compiler(True), executor()
    example = encode_row(ROWS[1], compiler, model, soft=True)
    assert example.executor_prompt.ids.count(model.placeholder) == compiler.n_tokens
    assert "go to shelf 2" in model.tokenizer.decode(example.executor_prompt.ids)


def test_rows_whose_soft_tokens_nobody_reads_have_no_loss_of_theirs(tmp_path):
    """Row i of ROWS gives guidance where i is odd: with `soft_on: guidance`, the others teach the emission alone."""
    t = trainer(tmp_path)
    t.executor.reads = PAPER_VIEW
    t.compiler.eval()
    t.compiler.projector.draw = lambda g, *a: g.mu
    examples = [t.examples[i] for i in range(4)]
    assert [e.soft_read for e in examples] == [False, True, False, True]
    assert [t.executor.placeholder in e.executor_prompt.ids for e in examples] == [False, True, False, True]
    some, read = (sft_losses(t.compiler, t.executor, part, t.config) for part in (examples, examples[1::2]))
    assert {name: len(value) for name, value in some.items()} == {name: 4 if name == "text" else 2 for name in some}
    for name in ("action", "entropy", "orth", "latent"):
        torch.testing.assert_close(some[name], read[name], atol=1e-5, rtol=1e-5)
    silent = sft_losses(t.compiler, t.executor, examples[::2], t.config)
    assert all(value.tolist() == [0.0] for name, value in silent.items() if name != "text") and len(silent) == 5


def test_a_checkpoint_says_what_its_executor_read(tmp_path):
    shown = {"reads_state": True, "soft_on": "always", "history": 7, "first_view": True, "goal_last": True}
    settings = {"context": "rebuilt", "past_guidance": "kept", **shown}
    list(trainer(tmp_path, executor=settings, max_steps=1).steps())
    assert checkpoint.executor_inputs(checkpoint.find(tmp_path)) == settings


def test_an_executor_that_reads_the_first_view_is_not_trained_for_on_rows_without(tmp_path):
    save_rows([replace(row, first="") for row in ROWS], tmp_path / "rows")
    config = SftConfig(
        rows=str(tmp_path / "rows"), executor={"first_view": True, "context": "rebuilt"}, allow_leakage=True
    )
    with pytest.raises(ConfigError, match="first view"):
        train_sft(config, tmp_path / "out")


def test_rows_round_trip(tmp_path):
    save_rows(ROWS, tmp_path / "rows")
    assert load_rows(tmp_path / "rows") == ROWS
    with pytest.raises(FileNotFoundError, match="collect"):
        load_rows(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no rows"):
        save_rows([], tmp_path / "none")
