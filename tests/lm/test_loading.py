"""Loading: a frozen model that is spread over devices acts, learns and hashes as one that is held by one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations import bitsandbytes
from transformers.utils import import_utils

from configs.models import ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from envs.spec import ExecutorInstructions
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm import backbone
from lm.backbone import load_backbone, quantization

MODEL = Path(__file__).parents[2] / "zoo" / "household" / "executor"
COMMANDS = ("go to shelf 1", "go to cabinet 2", "look")


def request(i: int) -> ExecutorRequest:
    soft = torch.randn(4, 128, generator=torch.Generator().manual_seed(i))
    return ExecutorRequest("put a mug", MemoryBlock(soft=soft), ("look",) * i, "You see nothing.", COMMANDS)


def one() -> FrozenExecutor:
    return FrozenExecutor(load_backbone(MODEL, torch.float32, "cpu"))


def test_weights_are_read_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device other than the CPU never gets them by way of the host's memory: here one that holds nothing."""
    monkeypatch.setattr(transformers.PreTrainedModel, "to", lambda *args, **settings: pytest.fail("it is moved"))
    read = load_backbone(MODEL, torch.float32, "meta").model
    assert all(parameter.is_meta for parameter in read.parameters())


def test_a_spread_model_is_the_same_model(tmp_path: Path) -> None:
    """Some of its weights are on disk, and come when they are needed."""
    whole = one()
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(whole.model.config.num_hidden_layers)]
    places = {part: "disk" if part in ("model.layers.1", "model.layers.2") else "cpu" for part in parts}
    spread = FrozenExecutor(load_backbone(MODEL, torch.float32, "cpu", device_map=places))
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
    assert load_frozen(config, ExecutorInstructions("")).act([request(0)]) == load_frozen(
        plain, ExecutorInstructions("")
    ).act([request(0)])


# -- fewer bits -------------------------------------------------------------------------------------------------------


def test_quantisation_without_bitsandbytes_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match=r"quantize=4bit needs bitsandbytes.*pip install"):
        load_frozen(ExecutorConfig(model="no/such-model", quantize="4bit"), ExecutorInstructions(""))


def test_bitsandbytes_that_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(raise_exception: bool) -> None:
        raise RuntimeError("no backend")

    monkeypatch.setattr(import_utils, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(bitsandbytes, "validate_bnb_backend_availability", broken)
    with pytest.raises(ValueError, match="does not run here: no backend"):
        quantization("8bit", torch.float32, "cpu")


@pytest.mark.parametrize(("bits", "device"), [("8bit", "cpu"), ("4bit", "cuda:0")])
def test_quantisation_is_a_setting_that_transformers_gets(
    monkeypatch: pytest.MonkeyPatch, bits: str, device: str
) -> None:
    """It computes in the executor's dtype, and is made on the device that the settings name."""
    asked: dict[str, object] = {}
    whole = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(name: str, **how: object) -> object:
        asked.update(how)
        return whole(name, dtype=how["dtype"])

    monkeypatch.setattr(import_utils, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(bitsandbytes, "validate_bnb_backend_availability", lambda **_: True)
    monkeypatch.setattr(backbone.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(backbone, "device_of", lambda name: name)  # this machine may have no GPU
    load_frozen(ExecutorConfig(dtype="bfloat16", device=device, quantize=bits), ExecutorInstructions(""))
    config = asked["quantization_config"]
    assert (config.load_in_8bit, config.load_in_4bit) == (bits == "8bit", bits == "4bit")
    assert bits == "8bit" or (config.bnb_4bit_quant_type, config.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert asked["device_map"] == {"": device}


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match=r"executor\.vllm\.extra"):
        ExecutorConfig(engine="vllm", quantize="8bit")
    for kind, backend in ((SftConfig, "fsdp"), (GrpoConfig, "zero3")):
        with pytest.raises(ValueError, match="cannot slice the weights"):
            kind(executor=ExecutorConfig(quantize="4bit"), backend=backend)


def test_4_bits_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes changes the weights' bytes on first use there."""
    monkeypatch.setattr(import_utils, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(bitsandbytes, "validate_bnb_backend_availability", lambda **_: True)
    with pytest.raises(ValueError, match="would not be frozen"):
        quantization("4bit", torch.float32, "cpu")


def test_an_8bit_executor_is_like_the_whole_one_and_soft_tokens_get_their_gradient() -> None:
    pytest.importorskip("bitsandbytes")
    whole, small = one(), FrozenExecutor(load_backbone(MODEL, torch.float32, "cpu", quantize="8bit"))
    prompt, found = whole.encode(request(0)), []
    for model in (whole, small):
        soft = prompt.soft.clone().requires_grad_()  # type: ignore[union-attr]
        scores = model.candidate_logprobs([replace(prompt, soft=soft)], [COMMANDS])[0]
        scores.log_softmax(0)[1].backward()
        assert soft.grad is not None and all(p.grad is None for p in model.model.parameters())
        found.append(soft.grad.flatten())
    assert float(torch.cosine_similarity(found[0], found[1], dim=0)) > 0.8 and float(found[1].norm()) > 0
    sizes = [sum(p.numel() * p.element_size() for p in model.model.parameters()) for model in (whole, small)]
    assert sizes[1] < 0.6 * sizes[0]
    before = small.hash()
    small.act([request(0)])
    assert small.hash() == before != whole.hash()
