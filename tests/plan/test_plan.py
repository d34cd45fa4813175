"""`memcompiler plan`: what a run needs, before anything is started."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu.models import ModelPair
from configs.evaluation import EvalConfig
from configs.load import CONFIGS, ConfigError, load_config
from configs.models import ExecutorConfig
from configs.reproduce import find_chain, shipped_chains
from configs.training import GrpoConfig, SftConfig
from lm import architecture
from lm.architecture import cache_bytes_per_token, model_config, weight_bytes
from memcompiler.cli import app
from plan import replay
from plan.budget import GIB, Budget, Gpu, Lengths, Plan, find_gpu, verdict
from plan.command import load_any
from plan.models import ShapedBackbone
from plan.replay import Replay, replay_sft
from plan.shapes import Ledger, Shape
from plan.stages import HOST, _trainer, plan, plans, remedy
from runtime.progress import disable_library_progress_bars
from tests.plan.real_runs import Check, check_act, check_compile, check_sft, check_update, make_llama
from zoo.household.words import LEXICON
from zoo.models import make_compiler, make_processor, make_tokenizer, save

SHORT = Lengths(prompt=64, emission=12, acting=40, action=4, memory=30, candidates=3)
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = ["compiler.model=zoo/household/compiler", "executor.model=zoo/household/executor"]
H100 = Gpu("80 GiB", 80)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models"), make_tokenizer(LEXICON)
    torch.manual_seed(0)
    disable_library_progress_bars()
    make_llama(folder / "grouped", tokenizer, 64, 2, 4, 2, 192)
    save(folder / "vlm", make_compiler(tokenizer, hidden=64, layers=2), make_processor(tokenizer))
    return folder


SHALLOW: dict[str, Any] = {
    "num_hidden_layers": 9,  # sft/smollm2-frozen trains those from the ninth on
    "depth": 4,  # of a vision tower
    "fullatt_block_indexes": [3],
    "deepstack_visual_indexes": [0, 1, 2],
}


@pytest.fixture
def shallow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the shipped architectures few layers, because a plan runs the code of every layer."""
    for config in architecture.KNOWN.rglob("config.json"):
        copy = tmp_path / "known" / config.relative_to(architecture.KNOWN)
        copy.parent.mkdir(parents=True)
        copy.write_text(json.dumps(cut(json.loads(config.read_text()))))
    monkeypatch.setattr(architecture, "KNOWN", tmp_path / "known")
    monkeypatch.setattr(replay, "REPLAYS", {})  # those by the same names are of whole models


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """Give a config and those in it the layers of `SHALLOW`."""
    inner = {name: cut(part) for name, part in config.items() if isinstance(part, dict)}
    return {**config, **inner, **{name: value for name, value in SHALLOW.items() if name in config}}


# shapes ---------------------------------------------------------------------------------------------------------------


def test_a_ledger_counts_what_is_held_and_what_was_held_at_most():
    ledger = Ledger()
    a = ledger.shaped(torch.empty(4, 8))  # 128 bytes
    b = a * 2  # 128 more
    assert ledger.live.total() == 256
    c = b.t()  # a view: nothing
    del b
    assert ledger.live.total() == 256
    del c
    assert (ledger.live.total(), ledger.peak.total()) == (128, 256)


def test_a_product_of_shapes_has_its_flops_and_its_gradient():
    ledger = Ledger()
    x, w = (torch.nn.Parameter(ledger.shaped(torch.empty(shape))) for shape in ((3, 4), (4, 5)))
    (x @ w).sum().backward()
    assert isinstance(w.grad, Shape) and w.grad.shape == (4, 5)
    assert ledger.flops == 3 * (2 * 3 * 4 * 5)  # forward, and the gradient of either side


# arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        (SMOL, 134_515_008),
    ],
)
def test_shipped_architectures_have_as_many_parameters_as_the_models(name: str, parameters: int):
    ledger = Ledger()
    backbone = ShapedBackbone(name, torch.bfloat16, ledger, "weights")
    assert backbone.hidden_size
    rotary = 4 * 1024  # inverse frequencies, in fp32
    assert 0 <= ledger.live["weights"] - 2 * parameters < rotary


def test_what_is_kept_of_a_token_by_hand():
    """14 B: keys and values, 48 layers, 8 heads of 128, 2 bytes: 2 * 48 * 8 * 128 * 2."""
    assert cache_bytes_per_token(model_config("Qwen/Qwen2.5-14B-Instruct").get_text_config(), "bfloat16") == 196_608


@pytest.mark.seconds
def test_an_sft_step_of_smollm2_by_hand():
    """Trained are LoRA of rank 16 on q (576 -> 576) and v (576 -> 192) of 30 layers, and the projector 576 -> 2 * 576
    with bias: 30 * 16 * (2 * 576 + 576 + 192) + 577 * 1152 = 921,600 + 664,704 parameters in fp32."""
    config = load_config(SftConfig, "sft/paper", [f"compiler.model={SMOL}", f"executor.model={SMOL}"])
    made = replay_sft(config, SHORT, 1)
    assert made.trained == 1_586_304
    assert made.held["gradients"] == 4 * 1_586_304 and made.held["moments"] == 8 * 1_586_304
    assert made.weights == pytest.approx(2 * 2 * 134_515_008 + 4 * 1_586_304, rel=1e-4)
    # A forward pass: two FLOPs for each weight in a product and token; attention comes on top.
    layer = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    lora = 16 * (2 * 576 + 576 + 192)
    read = SHORT.prompt + SHORT.emission + 16
    products = 2 * read * 30 * (layer + lora) + 2 * SHORT.emission * 576 * 49152 + 2 * 16 * 576 * 1152
    assert products <= made.flops["compiler forward"] <= 1.05 * products


def test_backends_share_out_what_they_say_they_do():
    held = Counter({"compiler weights": 700, "executor weights": 900, "activations": 100})
    replay = Replay(held, {}, trained=10, layer=50, root=200, towers=100)
    whole, cut = (_trainer("trainer", replay, backend, 4, 0) for backend in ("replicated", "fsdp"))
    assert (whole.weights, whole.gradients, whole.moments) == (1600, 40, 80)
    assert cut.weights == (1600 - 100) / 4 + 100 + 200 + 2 * 50  # slices, the tower, what is gathered
    assert (cut.gradients, cut.moments) == (10, 20)


@pytest.mark.seconds
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_sft_in_slices_is_never_whole_on_a_gpu_and_once_in_the_hosts_memory(backend):
    changes = [f"compiler.model={SMOL}", f"executor.model={SMOL}", f"backend={backend}", "gradient_checkpointing=false"]
    config = load_config(SftConfig, "sft/paper", changes)
    (budget,) = plan(config, SHORT, H100, 8).budgets
    whole = 2 * 2 * 134_515_008
    assert budget.loading == 0 and budget.host == pytest.approx(HOST + whole / 8, rel=0.01)


@pytest.mark.seconds
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_grpo_in_slices_has_a_whole_compiler_only_where_it_rolls_out_by_itself(backend, shallow: None):
    changes = [
        f"compiler.model={SMOL}",
        f"executor.model={SMOL}",
        f"backend={backend}",
        "placement.trainers=4",
        "placement.executors=1",
        "loss.latent_gradient=density_root",
        "gradient_checkpointing=false",
    ]
    weights = weight_bytes(SMOL, "bfloat16")
    alone, served = (
        plan(
            load_config(GrpoConfig, "grpo/paper", [*changes, f"placement.compilers={n}", f"compiler.engine={engine}"]),
            SHORT,
            H100,
            8,
        ).budgets[0]
        for n, engine in ((0, "hf"), (3, "vllm"))
    )
    assert alone.weights - served.weights == pytest.approx(weights, rel=0.01)
    assert alone.loading > weights + GIB and served.loading == 0  # loaded whole, and cut then
    assert served.host - HOST == pytest.approx(weights / 4, rel=0.01) and alone.host == HOST


@pytest.mark.seconds
def test_rollouts_ahead_of_updates_take_a_second_compiler_and_the_plan_says_what_they_save():
    changes = ([f"max_staleness={most}", "loss.importance_cap=2"] for most in (0, 2))
    configs = (load_config(GrpoConfig, "grpo/quickstart", given) for given in changes)
    alone, ahead = (plan(config, SHORT, H100, 1) for config in configs)
    weights = weight_bytes("zoo/household/compiler", "float32")
    assert ahead.budgets[0].weights - alone.budgets[0].weights == pytest.approx(weights, rel=0.05)
    longer = max(ahead.shares["update"], 1 - ahead.shares["update"])
    assert f"up to 2 updates ahead: on devices of their own, an update takes at least {longer:.0%}" in ahead.notes[-1]
    assert not any("ahead" in note for note in alone.notes)


@pytest.mark.seconds
def test_unequal_rows_cost_more_than_their_number_says():
    changes = [f"compiler.model={SMOL}", f"executor.model={SMOL}", "gradient_checkpointing=false"]
    config = load_config(SftConfig, "sft/paper", changes)
    one, two = (replay_sft(config, SHORT, rows).held["activations"] for rows in (1, 2))
    assert two > 2.05 * one  # a mask, and keys and values repeated for every head


# predictions against real runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [check_sft, check_update, check_compile, check_act])
@pytest.mark.parametrize(("compiler", "dtype", "rows"), [("vlm", "float32", 3), ("grouped", "bfloat16", 1)])
def test_the_prediction_is_what_a_real_run_takes(models: Path, check, compiler: str, dtype: str, rows: int):
    lengths = Lengths(prompt=120, emission=16, acting=80, action=5, memory=60, candidates=6)
    pair = ModelPair("tiny", str(models / compiler), str(models / "grouped"), dtype, rows)
    found: Check = check(pair, lengths)
    assert found.transient[0] == pytest.approx(found.transient[1], rel=0.15)
    assert found.total[0] == pytest.approx(found.total[1], rel=0.1)


@pytest.mark.parametrize("check", [check_sft, check_update])
def test_the_prediction_holds_under_gradient_checkpointing(models: Path, check):
    lengths = Lengths(prompt=120, emission=16, acting=80, action=5, memory=60, candidates=6)
    plain, again = (
        check(ModelPair("tiny", str(models / "vlm"), str(models / "grouped"), "float32", 3, checkpointing), lengths)
        for checkpointing in (False, True)
    )
    assert again.transient[0] == pytest.approx(again.transient[1], rel=0.15)
    assert again.transient[1] < plain.transient[1]  # it does something


@pytest.mark.seconds
def test_gradient_checkpointing_is_what_makes_a_run_fit():
    """One row of SmolLM2 at a time: there is nothing smaller to take."""
    changes = [f"compiler.model={SMOL}", f"executor.model={SMOL}", "gradient_checkpointing=false"]
    config = load_config(SftConfig, "sft/paper", changes)
    whole, again = (
        plan(config.model_copy(update={"gradient_checkpointing": on}), SHORT, H100, 1) for on in (False, True)
    )
    assert again.budgets[0].activations < 0.5 * whole.budgets[0].activations
    between = Gpu("", (whole.needs() + again.needs()) / 2)
    assert not whole.fits(between, 1) and remedy(config, SHORT, between, 1) == ["gradient_checkpointing=True"]


# fits, or not ---------------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_is_told_what_would():
    config = load_config(SftConfig, "sft/quickstart", ["batch_size=16", "micro_batch_size=16"])
    needed = {
        rows: plan(config.model_copy(update={"micro_batch_size": rows}), SHORT, H100, 1).needs() for rows in (16, 4)
    }
    assert needed[4] < needed[16]
    small = Gpu("small", (needed[4] + needed[16]) / 2)
    found = remedy(config, SHORT, small, 1)
    assert found is not None and found[0].startswith("micro_batch_size=")
    made = plan(config, SHORT, small, 1)
    assert verdict(made, small, 1, found).endswith(f"would fit with {found[0]}")
    assert plan(config, SHORT, H100, 1).fits(H100, 1)


@pytest.mark.seconds
def test_tasks_that_are_played_during_sft_have_their_prompts_counted(shallow: None):
    changes = [f"compiler.model={SMOL}", f"executor.model={SMOL}", "micro_batch_size=1", "compiler.batch_size=64"]
    plain, played = (
        plan(
            load_config(SftConfig, "sft/paper", [*changes, "validation.share=0.1", f"evaluation.tasks={n}"]),
            Lengths(),
            H100,
            1,
        ).budgets[0]
        for n in (0, 64)
    )
    text, config = model_config(SMOL).get_text_config(), load_config(SftConfig, "sft/paper", changes)
    read = Lengths().prompt + config.compiler.max_new_tokens + config.compiler.soft.n_tokens
    assert plain.kv_cache == 0 and played.kv_cache == 64 * read * cache_bytes_per_token(text, "bfloat16")
    assert (played.weights, played.moments) == (plain.weights, plain.moments)


def test_processes_on_one_gpu_share_it_and_more_gpus_than_there_are_do_not_fit():
    engine = Budget("engine", "a", count=2, weights=30 * GIB, least=20 * GIB, share=0.45)
    parts = [engine, Budget("actor", "a", count=2, weights=20 * GIB)]
    made = Plan("grpo", "", tuple(parts), {}, {}, 0, {})
    assert made.needs() == pytest.approx(50) and made.gpus == 2
    assert made.fits(Gpu("", 50), 2) and not made.fits(Gpu("", 49), 2) and not made.fits(Gpu("", 50), 1)
    alone = Plan("grpo", "", (Budget("engine", "a", weights=10 * GIB, least=30 * GIB, share=0.5),), {}, {}, 0, {})
    assert alone.needs() == pytest.approx(60)


@pytest.mark.seconds
def test_an_engine_whose_longest_sequence_does_not_fit_is_given_a_shorter_one(shallow: None):
    changes = [
        "compiler.model=Qwen/Qwen2.5-7B-Instruct",
        "compiler.engine=vllm",
        "executor.engine=vllm",
        "executor.model=Qwen/Qwen2.5-7B-Instruct",
        "deliveries=[none]",
    ]
    config = load_config(EvalConfig, None, changes)
    (roomy,) = plan(config, Lengths(), H100, 1).budgets
    tight = Gpu("", 0.99 * roomy.least / roomy.share / GIB)
    made = plan(config, Lengths(), tight, 1)
    assert [budget.process for budget in made.budgets] == ["executor engine"]  # nothing here needs the compiler
    assert not made.fits(tight, 1)
    found = remedy(config, Lengths(), tight, 1)
    assert found is not None and "executor.vllm" in found[0]


@pytest.mark.seconds
def test_an_executor_that_is_quantised_takes_what_its_linear_layers_are_left_with(shallow: None):
    """Qwen2.5-14B, by hand: what is not a linear layer of a block stays in bfloat16."""
    model = "Qwen/Qwen2.5-14B-Instruct"
    config = load_config(EvalConfig, None, [f"executor.model={model}", "deliveries=[none]", "executor.batch_size=1"])
    plans = {bits: plan(_changed(config, bits), Lengths(), H100, 1) for bits in (None, "8bit", "4bit")}
    weights, layers = {bits: made.budgets[0].weights for bits, made in plans.items()}, SHALLOW["num_hidden_layers"]
    rows = 5120 + 2 * 1024 + 5120 + 2 * 13824 + 5120  # q, k and v, o, gate and up, down
    numbers = 5120 * (5120 + 2 * 1024 + 5120 + 2 * 13824) + 13824 * 5120
    assert weights[None] - weights["8bit"] == layers * (numbers - 4 * rows)
    assert weights[None] - weights["4bit"] == pytest.approx(layers * numbers * (2 - 0.5 - 1 / 64 - 1 / 4096))
    between = Gpu("", (plans[None].needs() + plans["8bit"].needs()) / 2)
    assert remedy(config, Lengths(), between, 1) == ["executor.quantize=8bit"]


def _changed(config: EvalConfig, quantize: str | None) -> EvalConfig:
    return config.model_copy(update={"executor": config.executor.model_copy(update={"quantize": quantize})})


def test_shares_of_time_sum_to_one_and_follow_the_flops():
    config = load_config(SftConfig, "sft/quickstart", [])
    shares = plan(config, SHORT, H100, 1).shares
    assert sum(shares.values()) == pytest.approx(1) and shares["backward"] > shares["executor forward"]


# names and configurations ---------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_here_is_planned_by_the_name_of_its_model():
    assert model_config("/models/Qwen2.5-14B-Instruct").num_hidden_layers == 48


def test_a_model_that_nobody_knows_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"no model '/nowhere/Nobody-3B': name a folder.*Qwen2\.5-14B-Instruct"):
        model_config("/nowhere/Nobody-3B")


def test_a_gpu_is_a_number_or_a_name():
    assert (find_gpu("24").gib, find_gpu("H100").gib) == (24, 79.2)
    with pytest.raises(ConfigError, match="unknown GPU 'abacus'"):
        find_gpu("abacus")


def test_lengths_that_cannot_be_read_are_refused():
    assert Lengths.read("prompt=50, action=3") == Lengths(prompt=50, action=3)
    for wrong in ("prompt=none", "poem=3", "prompt=0"):
        with pytest.raises(ConfigError, match="names: prompt"):
            Lengths.read(wrong)


NAMES = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("reproduce/")])
def test_every_shipped_configuration_can_be_planned(name: str, shallow: None):
    check_plans(load_any(name, []))


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_chains())
def test_every_kind_of_stage_of_a_chain_can_be_planned(name: str, shallow: None):
    for stage in {stage.kind: stage for stage in find_chain(name).stages()}.values():
        check_plans(stage.config)


@pytest.mark.parametrize("setting", ["compiler.checkpoint=null", "compiler.engine=http compiler.url=http://a:1"])
def test_a_proxy_that_loads_no_model_has_no_plan(setting: str):
    config = load_any("serve/proxy", setting.split())
    with pytest.raises(ConfigError, match="this proxy loads no model"):
        plans(config, SHORT, H100, 1)


def check_plans(config: Any) -> None:
    for _, made in plans(config, SHORT, H100, 8):
        made.fits(H100, 8)
        assert all(budget.gpu > 0 and budget.host > 0 for budget in made.budgets)
        json.dumps(made.to_json(H100, 8, None))


def test_the_command_prints_a_table_and_ends_with_whether_it_fits(tmp_path: Path):
    out = tmp_path / "plan.json"
    arguments = ["plan", "-c", "sft/quickstart", *TINY, "--lengths", "prompt=64,acting=40", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.strip().splitlines()[-1].startswith("fits: yes (1 of 1 GPUs")
    record = json.loads(out.read_text())["plans"][0]
    assert record["fits"] is True and record["budgets"][0]["process"] == "trainer"
    assert record["budgets"][0]["activations"] > 0


@pytest.mark.seconds
@pytest.mark.parametrize("command", [["train", "sft", "-c", "sft/paper"], ["train", "grpo", "-c", "grpo/quickstart"]])
def test_a_dry_run_prints_the_plan_once_and_starts_nothing(
    command: list[str], shallow: None, tmp_path: Path, monkeypatch
):
    out = ["--dry-run", "--out", str(tmp_path / "run")]
    ran = CliRunner().invoke(app, [*command, *out])
    assert ran.exit_code == 0 and ran.output.rstrip().splitlines()[-1].startswith("fits: ")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "1")
    assert CliRunner().invoke(app, [*command, *out]).output == ""


def test_an_executor_behind_an_endpoint_takes_nothing_here():
    config = load_config(EvalConfig, None, ["executor.engine=scripted", "deliveries=[none]"])
    assert plan(config, SHORT, H100, 1).budgets == ()
    assert ExecutorConfig(engine="scripted").engine == "scripted"
