"""How a model is loaded, as settings say: attention, revision, arguments of its chat template, of vLLM's engine."""

import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from compiler.build import load_compiler
from configs.load import ConfigError, load_config
from configs.models import RESERVED_VLLM_ARGS, CompilerConfig, ExecutorConfig, VllmEngine
from configs.training import GrpoConfig
from envs.spec import ExecutorInstructions
from executor.build import load_frozen
from lm import backbone as backbones
from lm.backbone import load_configured_backbone, load_encoder
from lm.device import device_of, dtype_of
from lm.prompt import PromptEncoder, PromptPart
from lm.vllm import SETTINGS, load_engine, revision_arguments
from tests import tiny_models

TINY = {"model": "zoo/household/executor", "dtype": "float32", "device": "cpu", "instructions": "none"}


class Tabled:
    embedding_table = torch.zeros(10, 64)


# devices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:-1", "cpu:0", ""])
def test_a_device_of_another_form_is_refused_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        ExecutorConfig(device=device)


@pytest.mark.parametrize(
    ("gpus", "device", "found"),
    [
        (0, "auto", "cpu"),
        (2, "cpu", "cpu"),
        (2, "auto", "cuda:1"),
        (2, "cuda", "cuda:1"),
        (2, "cuda:0", "cuda:0"),
        (0, "cuda", "device=cuda: this machine has no CUDA device"),
        (0, "cuda:3", "device=cuda:3: this machine has no CUDA device"),
        (1, "cuda:1", "device=cuda:1: this machine has 1 CUDA device, cuda:0"),
        (2, "cuda:2", "device=cuda:2: this machine has 2 CUDA devices, cuda:0 to cuda:1"),
    ],
)
def test_a_device_is_resolved_on_this_machine(
    gpus: int, device: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's own GPU is the second one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if ":" in found and not found.startswith("cuda"):
        with pytest.raises(ConfigError) as refused:
            device_of(device)
        assert str(refused.value) == f"{found}; set device=auto or device=cpu"
    else:
        assert device_of(device) == found


@pytest.mark.parametrize("narrow", [True, False])
def test_auto_is_the_number_format_that_the_device_computes_in(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: narrow)
    assert dtype_of("auto", "cuda:0") is (torch.bfloat16 if narrow else torch.float32)
    assert dtype_of("auto", "cpu") is torch.float32 and dtype_of("float16", "cpu") is torch.float16
    model = load_configured_backbone(CompilerConfig(**{**TINY, "dtype": "auto"})).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# attention -----------------------------------------------------------------------------------------------------------


def test_attention_is_a_setting_of_both_models():
    for attention in ("eager", "sdpa"):
        compiler = load_compiler(CompilerConfig(**TINY, attention=attention), Tabled())
        executor = load_frozen(ExecutorConfig(**TINY, attention=attention), ExecutorInstructions(""))
        for model in (compiler.backbone, executor.backbone):
            assert model.model.config._attn_implementation == attention and model.attends_fully
    with pytest.raises(ValidationError, match="attention"):
        CompilerConfig(**TINY, attention="fast")


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_kernels_that_take_no_mask_are_given_no_tree(attention):
    """Each candidate is a row of its own then, and rows that begin alike are read each for itself."""
    model = tiny_models.lm_backbone()
    assert model.attends_fully
    model = tiny_models.lm_backbone()
    model.model.config._attn_implementation_internal = attention
    assert not model.attends_fully


# revisions -----------------------------------------------------------------------------------------------------------


def test_a_revision_reaches_config_weights_and_processor(monkeypatch):
    asked = []

    def recorder(kind):
        def from_pretrained(name, **settings):
            asked.append((kind, name, settings.get("revision")))
            return SimpleNamespace(to=lambda device: None)

        return SimpleNamespace(from_pretrained=from_pretrained)

    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(backbones, kind, recorder(kind))
    monkeypatch.setattr(backbones, "Backbone", lambda *arguments, **settings: (arguments, settings))
    monkeypatch.setattr(backbones, "share_heads", lambda model: None)
    load_configured_backbone(CompilerConfig(model="someone/model", revision="abc123", device="cpu"))
    assert {kind for kind, *_ in asked} == {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}
    assert {(name, revision) for _, name, revision in asked} == {("someone/model", "abc123")}


def test_a_folder_has_no_revisions():
    with pytest.raises(ValueError, match="is a folder: a revision needs a model on the Hub"):
        load_configured_backbone(CompilerConfig(**TINY, revision="abc123"))


def test_vllm_is_told_the_revision_of_model_and_tokenizer():
    assert revision_arguments(None) == {} and revision_arguments("abc") == {
        "revision": "abc",
        "tokenizer_revision": "abc",
    }


# chat template -------------------------------------------------------------------------------------------------------


def thinking() -> object:
    tokenizer = tiny_models.make_tokenizer(tiny_models.LEXICON)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    return tokenizer


def test_arguments_reach_the_chat_template():
    plain, told = PromptEncoder(thinking()), PromptEncoder(thinking(), arguments={"enable_thinking": False})
    a, b = (encoder.encode([PromptPart("hello")]).ids for encoder in (plain, told))
    assert b[: len(a)] == a and told.tokenizer.decode(b[len(a) :]) == "<think></think>"


def test_arguments_that_a_template_does_not_ask_for_are_refused():
    with pytest.raises(ValueError, match="does not use enable_thinking"):
        load_encoder("zoo/household/compiler", arguments={"enable_thinking": False})
    with pytest.raises(ValueError, match="does not use enable_thinking"):
        load_configured_backbone(ExecutorConfig(**TINY, chat_template={"enable_thinking": False}))


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "chat_template", "a b"])
def test_what_the_encoder_itself_says_is_not_the_users(name):
    with pytest.raises(ValidationError, match="not an argument that a chat template may be given here"):
        CompilerConfig(chat_template={name: True})


# vLLM's engine -------------------------------------------------------------------------------------------------------


def test_engine_arguments_go_through_by_name(monkeypatch):
    given: dict = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **settings: given.update(settings)))
    config = load_config(
        GrpoConfig, None, ["compiler.vllm.extra={kv_cache_dtype: fp8, compilation_config: {level: 3}}"]
    )
    load_engine("folder", "bfloat16", {**SETTINGS, **revision_arguments("abc")}, config.compiler.vllm)
    assert given["kv_cache_dtype"] == "fp8" and given["compilation_config"] == {"level": 3}
    assert given["revision"] == "abc" and given["max_num_seqs"] == 64 and "extra" not in given
    assert given.get("block_size") == (None if torch.cuda.is_available() else 32)


def test_an_argument_that_vllm_does_not_know_is_refused_by_name(monkeypatch):
    def LLM(model, dtype, **settings):
        raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'speed'")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    with pytest.raises(ValueError, match=r"vllm\.extra: .*'speed'"):
        load_engine("folder", "bfloat16", {}, VllmEngine(extra={"speed": 11}))
    with pytest.raises(TypeError):
        load_engine("folder", "bfloat16", {}, VllmEngine())


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"max_num_seqs": 8}, "has a setting of its own"),
        ({"enable_lora": False}, "set by MemCompiler"),
        ({"worker_extension_cls": "os.system"}, "set by MemCompiler"),
        ({"trust_remote_code": True}, "set by MemCompiler"),
        ({"logits_processors": []}, "set by MemCompiler"),
        ({"--port": 1}, "no argument's name"),
        ({"quantization": {1, 2}}, "extra"),
        ({"swap_space": print}, "extra"),
    ],
)
def test_what_is_ours_or_no_json_is_refused(extra, says):
    with pytest.raises(ValidationError, match=says):
        VllmEngine(extra=extra)


def test_everything_that_our_backends_set_is_refused(monkeypatch):
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    from compiler.vllm import engine_settings as of_compiler
    from executor.vllm import engine_settings as of_executor

    assert {*of_compiler(16), *of_executor(), *revision_arguments("x")} <= set(RESERVED_VLLM_ARGS)
