"""Loading: a frozen model that is spread over devices acts, learns and hashes as one that is held by one."""

from dataclasses import replace
from pathlib import Path

import torch

from configs.models import ExecutorConfig
from envs.spec import Told
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.backbone import load_backbone

MODEL = Path(__file__).parents[2] / "zoo" / "household" / "executor"
COMMANDS = ("go to shelf 1", "go to cabinet 2", "look")


def request(i: int) -> ExecutorRequest:
    soft = torch.randn(4, 128, generator=torch.Generator().manual_seed(i))
    return ExecutorRequest("put a mug", MemoryBlock(soft=soft), ("look",) * i, "You see nothing.", COMMANDS)


def one() -> FrozenExecutor:
    return FrozenExecutor(load_backbone(MODEL, torch.float32, "cpu"))


def test_a_spread_model_is_the_same_model(tmp_path: Path) -> None:
    """Some of its weights are on disk, and come when they are needed."""
    whole = one()
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(whole.model.config.num_hidden_layers)]
    places = {part: "disk" if part in ("model.layers.1", "model.layers.2") else "cpu" for part in parts}
    spread = FrozenExecutor(load_backbone(MODEL, torch.float32, "cpu", device_map=places, offload_folder=str(tmp_path)))
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.hash() == whole.hash() and torch.equal(spread.embedding_table, whole.embedding_table)
    assert spread.backbone.device == torch.device("cpu")
    prompts = [whole.encode(request(i)) for i in range(2)]
    for theirs, ours in zip(*(m.candidate_logprobs(prompts, [COMMANDS] * 2) for m in (whole, spread)), strict=True):
        assert torch.equal(theirs, ours)
    gradients = []
    for model in (whole, spread):
        soft = prompts[0].soft.clone().requires_grad_()  # type: ignore[union-attr]
        model.candidate_logprobs([replace(prompts[0], soft=soft)], [COMMANDS])[0][1].backward()
        gradients.append(soft.grad)
    assert torch.equal(*gradients)
    for model in (whole, spread):
        model.mode = "generate"
    assert [a.text for a in whole.act([request(0)])] == [a.text for a in spread.act([request(0)])]


def test_placing_is_a_setting() -> None:
    config = ExecutorConfig(dtype="float32", device_map="auto")
    plain = config.model_copy(update={"device_map": None})
    assert load_frozen(config, Told("")).act([request(0)]) == load_frozen(plain, Told("")).act([request(0)])
