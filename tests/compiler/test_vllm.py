"""The compiler in vLLM is the compiler in Hugging Face: states, emissions, log-probabilities, sampling, training."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from compiler.language import Emission, ParseError, ParseResult
from compiler.records import CompileRequest, Decoding, never_cancelled
from compiler.vllm import VllmCompiler
from configs.models import Speed
from lm.engine_loop import wait_watching
from lm.vllm import HiddenStateExtension, tail_of, vllm_request
from memory.trajectory import png_bytes
from soft_mem.projector import Projector, ProjectorConfig
from tests import tiny_models, vllm_engines
from tests.vllm_engines import SAMPLING, assert_scored_alike, requests

# Seconds of a process that starts an engine in two more; each of them imports vLLM (28 s of a core where no bytecode is
# stored). Less than pytest's limit, so that a failure shows what the process said.
CHILD_S = 570


def using_vllm(test: Any) -> Any:
    for mark in vllm_engines.marks:
        test = mark(test)
    return test


def recorded(compiler: VllmCompiler) -> list[tuple[int, int]]:
    """(tokens of the prompt, tokens of it that came from the prefix cache) of every request from now on."""
    seen, run = [], compiler._run

    def spy(*arguments):
        outputs = run(*arguments)
        seen.extend((len(output.prompt_token_ids), output.num_cached_tokens) for output in outputs)
        return outputs

    compiler._run = spy  # type: ignore[method-assign]
    return seen


# -- given up ---------------------------------------------------------------------------------------------------------


@using_vllm
def test_what_nobody_waits_for_is_aborted_and_the_engine_goes_on(tmp_path: Path) -> None:
    ours = vllm_engines.served(vllm_engines.trained(False, decoding=Decoding(max_new_tokens=200)), tmp_path / "a")
    asked = [tiny_models.request(i, image=False) for i in range(3)]
    whole = ours.compile(asked)
    long = [i for i, c in enumerate(whole) if len(c.emission_ids) > 20]
    assert long  # there is something to cut short
    steps = 0

    def until_fifth(i: int) -> bool:
        nonlocal steps
        steps += i == long[0]
        return i != long[0] or steps < 5

    made = ours.compile(asked, wanted=until_fifth)
    assert made[long[0]].parse_error is ParseError.TRUNCATED and steps <= 10
    for i in {0, 1, 2} - {long[0]}:
        assert made[i].emission_ids == whole[i].emission_ids
        torch.testing.assert_close(made[i].mu, whole[i].mu, atol=1e-5, rtol=1e-5)
    ours.compile(asked, wanted=lambda i: False)
    assert [c.emission_ids for c in ours.compile(asked)] == [c.emission_ids for c in whole]


@using_vllm
def test_the_second_pass_is_made_where_soft_tokens_are_read(tmp_path: Path) -> None:
    ours = vllm_engines.served(vllm_engines.trained(False), tmp_path / "a")
    asked = [replace(tiny_models.request(i, image=False), soft_on="guidance") for i in range(4)]
    ours.speed = Speed(second_pass="always")
    before = ours.compile(asked)
    silent, plain = before[0].emission_ids, ours.parsed  # random models give no guidance: take all but this for such
    ours.parsed = lambda ids, cut: (plain(ids, cut)[0], ParseResult(Emission("go" if ids != silent else "")))  # type: ignore[method-assign]
    ours.speed, seen = Speed(), recorded(ours)
    made = ours.compile(asked)
    heard = [bool(c.emission.guidance) for c in made]
    assert 0 < sum(heard) < 4 and len(seen) == 4 + sum(heard) + ours.reissued
    for a, b, read in zip(made, before, heard, strict=True):
        assert a.emission_ids == b.emission_ids and (a.soft is not None) == read
        if read:
            torch.testing.assert_close(a.soft, b.soft, atol=1e-5, rtol=1e-5)
    seen.clear()
    assert all(c.soft is None for c in ours.compile([replace(r, soft_on="never") for r in asked])) and len(seen) == 4


# -- parity -----------------------------------------------------------------------------------------------------------


@using_vllm
@pytest.mark.parametrize("vlm", [True, False])
def test_greedy_compilations_equal_hugging_face(vlm: bool, tmp_path: Path) -> None:
    compiler = vllm_engines.trained(vlm)
    made = vllm_engines.served(compiler, tmp_path / "a").compile(requests())
    for ours, theirs in zip(made, compiler.compile(requests()), strict=True):
        for name in ("text", "emission", "parse_error", "prompt_ids", "emission_ids", "tokens_in", "tokens_out"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("text_logprobs", "mu", "log_sigma", "z", "soft", "latent_logprobs"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-4, rtol=1e-4, msg=name)
        assert ours.weight_version == 1
    assert any(c.parse_error is ParseError.TRUNCATED for c in made)  # the forced end-of-turn token was tried, too


@using_vllm
def test_speculation_takes_fewer_steps_to_the_same_emissions_and_reserved_tokens_stay_out(repository: Path) -> None:
    """In a separate process: vLLM's imports for speculation prevent a second engine in the same one (0.31)."""
    command = [sys.executable, "-m", "tests.vllm_engines", "speculating"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=CHILD_S)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    steps, tokens = map(int, said[-2].removeprefix("steps ").split(" tokens "))
    assert said[-3] == "alike" and steps < tokens and "samples greedily only" in said[-1]


@using_vllm
def test_hidden_states_equal_hugging_face(tmp_path: Path) -> None:
    """With the identity for a projector, mu is the hidden state: LoRA and picture are in it."""
    compiler = vllm_engines.trained(projector={"kind": "linear"})
    with torch.no_grad():
        compiler.projector.linear.weight.copy_(torch.eye(64))
        compiler.projector.linear.bias.zero_()
    made = vllm_engines.served(compiler, tmp_path / "a").compile(requests())
    for ours, theirs in zip(made, compiler.compile(requests()), strict=True):
        torch.testing.assert_close(ours.mu, theirs.mu, atol=1e-4, rtol=0)
    other = tiny_models.request(0)
    object.__setattr__(other, "image", tiny_models.request(3).image)
    assert not torch.allclose(compiler.compile([other])[0].mu, made[0].mu, atol=1e-3)


@using_vllm
def test_pictures_of_memory_are_read_as_hugging_face_reads_them(tmp_path: Path) -> None:
    compiler = vllm_engines.trained(True)
    views = [png_bytes(Image.new("RGB", (64, 64), (60 * i, 200, 10))) for i in range(3)]

    def asked(*pictures: bytes) -> CompileRequest:
        plain = tiny_models.request(1)  # two entries
        first, second = plain.memory
        return replace(plain, memory=(replace(first, images=pictures[:1]), replace(second, images=pictures[1:])))

    requests = [asked(views[0]), asked(*views), asked(views[1], views[0]), asked()]
    made = vllm_engines.served(compiler, tmp_path / "a").compile(requests)
    for ours, theirs in zip(made, compiler.compile(requests), strict=True):
        assert (ours.prompt_ids, ours.emission_ids) == (theirs.prompt_ids, theirs.emission_ids)
        torch.testing.assert_close(ours.mu, theirs.mu, atol=1e-4, rtol=1e-4)
    swapped = compiler.compile([asked(views[0], views[1])])[0]
    assert not torch.allclose(swapped.mu, made[2].mu, atol=1e-3)  # which entry a picture is of counts


@using_vllm
def test_log_probabilities_are_those_of_the_sampled_distribution(tmp_path: Path) -> None:
    compiler = vllm_engines.trained(decoding=SAMPLING)
    made = vllm_engines.served(compiler, tmp_path / "a").compile(requests())
    assert_scored_alike(compiler, made)
    compiler.decoding = replace(compiler.decoding, temperature=1.19)
    with pytest.raises(AssertionError):  # the comparison notices so small a difference
        assert_scored_alike(compiler, made)


@using_vllm
def test_sampling_frequencies_are_those_of_the_policy(tmp_path: Path) -> None:
    """First tokens of 3,000 emissions against the policy's distribution, in bins of about equal probability."""
    # Cold, because an untrained model's distribution is nearly flat: any temperature would fit it.
    compiler = vllm_engines.trained(False, decoding=Decoding(temperature=0.2, max_new_tokens=1))
    one = tiny_models.request(0, image=False)
    with torch.no_grad():
        scored = compiler.score([compiler.encode(one)], [[compiler.backbone.end_id]])
        policy = compiler.logprobs(scored.logits)[0, 0].exp()
        colder = (compiler.allowed(scored.logits)[0, 0] / 0.18).softmax(-1)
    ours = vllm_engines.served(compiler, tmp_path / "a", seed=7)
    drawn = torch.tensor(
        [draft.ids[0] for draft in ours._sample([ours.encode(one)] * 3000, ours.generator, never_cancelled)]
    )
    bins = 20
    order = policy.argsort(descending=True)
    bin_of = torch.empty_like(order)
    bin_of[order] = (policy[order].cumsum(0) * bins).long().clamp(max=bins - 1)
    seen = torch.bincount(bin_of[drawn], minlength=bins).float()

    def chi_square(probabilities: torch.Tensor) -> float:
        expected = 3000 * torch.zeros(bins).index_add(0, bin_of, probabilities)
        filled = expected > 0
        return float(((seen - expected) ** 2 / expected)[filled].sum())

    assert chi_square(policy) < 43.8  # the 99.9 % quantile at 19 degrees of freedom
    assert chi_square(colder) > 43.8  # the test would notice another temperature
    assert not set(drawn.tolist()) & set(compiler.backbone.suppressed)


@using_vllm
def test_reserved_tokens_are_never_sampled_and_the_seed_decides(tmp_path: Path) -> None:
    hot = Decoding(temperature=2.0, max_new_tokens=40)
    compiler = vllm_engines.trained(decoding=hot)
    ours = vllm_engines.served(compiler, tmp_path / "a", seed=3)
    made = ours.compile(requests())
    assert not any(set(compiler.backbone.suppressed) & set(c.emission_ids) for c in made)
    other = ours.compile(requests())
    ours.generator.manual_seed(3)
    again = ours.compile(requests())
    assert [c.emission_ids for c in again] == [c.emission_ids for c in made] != [c.emission_ids for c in other]
    for a, b, c in zip(again, made, other, strict=True):
        torch.testing.assert_close(a.z, b.z, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(a.z, c.z, atol=1e-2)


@using_vllm
def test_fresh_samples_have_ratio_one_in_grpo(tmp_path: Path) -> None:
    from tests.training.grpo_trainers import played, trainer
    from training.rollout import samples_of

    t = trainer(tmp_path)
    t.compiler.load_state_dict(vllm_engines.trained(False).state_dict())
    t.compiler.eval()
    ours = vllm_engines.served(t.compiler, tmp_path / "a")
    samples = samples_of(played(t, ours), t.compiler)
    assert len(samples) >= 8 and {s.weight_version for s in samples} == {1}
    with torch.no_grad():
        scores = t.policy.score(samples).logprobs
    n = t.compiler.n_tokens
    for row, sample in zip(scores, samples, strict=True):
        now = torch.cat([row[: sample.sampled], row[-n:]])
        torch.testing.assert_close(now, sample.rollout_logprobs, atol=1e-3, rtol=0)
    metrics = t.learn(samples)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert abs(metrics["mismatch_kl"]) < 1e-6


# -- prefix cache -----------------------------------------------------------------------------------------------------


@using_vllm
@pytest.mark.parametrize("vlm", [True, False])
def test_the_second_pass_computes_the_tail_and_less_than_a_block(vlm: bool, tmp_path: Path) -> None:
    compiler = vllm_engines.trained(vlm, decoding=SAMPLING)
    ours = vllm_engines.served(compiler, tmp_path / "a")
    seen = recorded(ours)
    made = ours.compile(requests())
    assert len(seen) == 10 and ours.reissued == 0
    for c, (total, cached) in zip(made, seen[5:], strict=True):
        forced = c.parse_error is ParseError.TRUNCATED
        assert ours.n_tokens < total - cached <= ours.n_tokens + vllm_engines.BLOCK + forced


@using_vllm
def test_a_tail_in_the_prefix_cache_is_computed_again(tmp_path: Path) -> None:
    """40 memory tokens are more than a block: a repeated request finds some of them cached."""
    compiler = vllm_engines.trained(n_tokens=40)
    ours = vllm_engines.served(compiler, tmp_path / "a")
    seen = recorded(ours)
    one = tiny_models.request(0)
    made = [*ours.compile([one]), *ours.compile([one])]
    assert ours.reissued == 1
    (total, cached), (again, past_cache) = seen[3:]
    assert total == again and cached > total - 40 and past_cache == 0
    for c in made:
        torch.testing.assert_close(c.mu, compiler.compile([one])[0].mu, atol=1e-4, rtol=0)


@using_vllm
def test_memory_first_prompts_hit_the_cache_all_episode_long(tmp_path: Path) -> None:
    compiler = vllm_engines.trained(instructions="Compile the memory. " * 5)
    ours = vllm_engines.served(compiler, tmp_path / "a")
    step = tiny_models.request(2)
    made = []
    for t in range(3):
        seen = recorded(ours)
        made += ours.compile([replace(step, observation=f"You see a drawer {t + 1}.", history=())])
        if t:
            shared = _common_prefix(made[t - 1].prompt_ids, made[t].prompt_ids)
            assert seen[0][1] == shared // vllm_engines.BLOCK * vllm_engines.BLOCK > 0
    assert_scored_alike(compiler, made)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


# -- adapters ---------------------------------------------------------------------------------------------------------


@using_vllm
def test_an_adapter_is_swapped_with_its_projector(tmp_path: Path) -> None:
    """The new weights are used and no cache of the old ones, even through a folder that is written again."""
    first, second = vllm_engines.trained(seed=1), vllm_engines.trained(seed=2)
    ours = vllm_engines.served(first, tmp_path / "a")
    before = ours.compile(requests())
    vllm_engines.save_adapter(second, tmp_path / "a")  # over the first
    for a, b in zip(ours.compile(requests()), before, strict=True):
        torch.testing.assert_close(a.mu, b.mu, atol=1e-5, rtol=1e-5)  # the copy in force is untouched
    ours.load_adapter(tmp_path / "a", 2, second.projector)
    seen = recorded(ours)
    after = ours.compile(requests())
    assert seen[0][1] == 0 and {c.weight_version for c in after} == {2}
    assert_scored_alike(second, after)
    assert not any(torch.allclose(a.mu, b.mu, atol=1e-2) for a, b in zip(after, before, strict=True))
    second.projector.linear.weight.data.zero_()  # ours is a copy
    torch.testing.assert_close(ours.compile(requests())[0].mu, after[0].mu, atol=1e-5, rtol=1e-5)


@using_vllm
def test_requests_in_flight_are_answered_by_the_weights_that_they_began_with(tmp_path: Path) -> None:
    long = Decoding(max_new_tokens=120)
    first, second = (vllm_engines.trained(False, seed=seed, decoding=long) for seed in (1, 2))
    ours = vllm_engines.served(first, tmp_path / "a")
    vllm_engines.save_adapter(second, tmp_path / "b")
    asked, begun = [tiny_models.request(i, image=False) for i in range(5)], threading.Event()
    with ThreadPoolExecutor(1) as thread:
        flying = thread.submit(ours.compile, asked, None, lambda i: begun.set() or True)
        assert begun.wait(300)
        ours.load_adapter(tmp_path / "b", 2, second.projector)
        after = ours.compile(asked)
        before = flying.result(300)
    assert ({c.weight_version for c in before}, {c.weight_version for c in after}) == ({1}, {2})
    assert_scored_alike(first, before)
    assert_scored_alike(second, after)


@using_vllm
def test_why_no_adapter_is_ever_overwritten_in_place(tmp_path: Path) -> None:
    """vLLM serves the old weights from an overwritten folder, under the old name and number, and says nothing."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    first, second = vllm_engines.trained(seed=1), vllm_engines.trained(seed=2)
    ours = vllm_engines.served(first, tmp_path / "ours")
    prompt = vllm_request(ours.encoder, ours.encode(tiny_models.request(0)))
    request = LoRARequest("in-place", 1_000_000, str(vllm_engines.save_adapter(first, tmp_path / "a")))

    def answer() -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)
        ((made,),) = [o.outputs for o in ours.llm.generate([prompt], params, lora_request=request, use_tqdm=False)]
        return next(iter(made.logprobs[0].values())).logprob

    before = answer()
    vllm_engines.save_adapter(second, tmp_path / "a")
    assert answer() == pytest.approx(before, abs=1e-5)


@using_vllm
@pytest.mark.parametrize("what", ["nothing", "rank", "corrupt"])
def test_an_adapter_that_does_not_load_leaves_the_old_one_in_force(what: str, tmp_path: Path) -> None:
    from configs.models import Lora

    compiler = vllm_engines.trained()
    ours = vllm_engines.served(compiler, tmp_path / "a")
    before = ours.compile(requests(1))
    bad = tmp_path / "bad"
    if what == "rank":
        vllm_engines.save_adapter(tiny_models.memory_compiler(lora=Lora(rank=32)), bad)
    elif what == "corrupt":
        vllm_engines.save_adapter(compiler, bad)
        (bad / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(RuntimeError, match="cannot load the adapter"):
        ours.load_adapter(bad, 2, compiler.projector)
    (after,) = ours.compile(requests(1))
    assert after.weight_version == 1 and after.emission_ids == before[0].emission_ids
    torch.testing.assert_close(after.mu, before[0].mu, atol=1e-5, rtol=1e-5)


# -- bad input --------------------------------------------------------------------------------------------------------


@using_vllm
def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path) -> None:
    ours = vllm_engines.served(vllm_engines.trained(), tmp_path / "a")
    assert ours.compile([]) == []
    long = replace(tiny_models.request(0), observation="cabinet 1 " * 1200)
    with pytest.raises(ValueError, match="raise max_model_len"):
        ours.compile([tiny_models.request(1), long])
    ours.decoding = Decoding(temperature=3.0, max_new_tokens=8)
    with pytest.raises(ValueError, match="temperature"):
        ours.compile([tiny_models.request(1)])
    with pytest.raises(ValueError, match="reads 32-d states"):
        ours.load_adapter(tmp_path / "a", 2, Projector(ProjectorConfig(32, 64)))
    ours.decoding = Decoding(max_new_tokens=2)
    assert len(ours.compile(requests(2))) == 2  # nothing of all this is left in the engine


@using_vllm
def test_an_engine_that_failed_amid_a_batch_is_refused(tmp_path: Path) -> None:
    ours = vllm_engines.served(vllm_engines.trained(), tmp_path / "a")
    left = ours.llm.enqueue([vllm_request(ours.encoder, ours.encode(tiny_models.request(0)))], use_tqdm=False)
    with pytest.raises(RuntimeError, match="restart it"):
        ours.compile([tiny_models.request(1)])
    ours.llm.llm_engine.abort_request(left, internal=True)
    assert ours.compile([tiny_models.request(1)])


@using_vllm
def test_an_engine_in_a_process_of_its_own_and_its_death(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.vllm_engines"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=CHILD_S)
    said = [line for line in done.stdout.splitlines() if line.startswith(("alike", "refused"))]
    assert said[:1] == ["alike"], done.stderr[-3000:]
    assert len(said) == 3, said


# -- waiting for an engine, without one -------------------------------------------------------------------------------


def test_a_wait_ends_with_the_engine_s_process() -> None:
    alive, dead, never = SimpleNamespace(engine_dead=False), SimpleNamespace(engine_dead=True), Future[int]()
    done, failed = Future[int](), Future[int]()
    done.set_result(3)
    failed.set_exception(TimeoutError("its own"))
    assert wait_watching(alive, done) == wait_watching(None, done) == 3
    with pytest.raises(TimeoutError, match="its own"):
        wait_watching(alive, failed)
    with pytest.raises(RuntimeError, match="process died"):
        wait_watching(dead, never)
    with pytest.raises(RuntimeError, match="did not answer within 0"):
        wait_watching(alive, never, timeout=0.0)


# -- the worker extension, without an engine --------------------------------------------------------------------------


def step(hidden: torch.Tensor | None, new: tuple = (), running: tuple = (), finished: tuple = ()) -> SimpleNamespace:
    """A scheduler's step: (request, prompt length, computed, scheduled, extra_args) new, (request, computed, scheduled)
    running. The runner's batch holds the running ones first."""
    return SimpleNamespace(
        hidden=hidden,
        finished_req_ids=set(finished),
        num_scheduled_tokens={r[0]: r[-1] for r in running} | {r[0]: r[3] for r in new},
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=[0] * length,
                num_computed_tokens=computed,
                sampling_params=SimpleNamespace(extra_args=extra),
            )
            for name, length, computed, _, extra in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r[0] for r in running], num_computed_tokens=[r[1] for r in running]
        ),
    )


def worker() -> tuple[HiddenStateExtension, Any]:
    """A worker with a runner that stores the hidden states of a step."""
    runner = SimpleNamespace(execute_model_state=None)

    def execute(scheduled: Any) -> str:
        batch = SimpleNamespace(req_ids=list(scheduled.num_scheduled_tokens))
        runner.execute_model_state = SimpleNamespace(hidden_states=scheduled.hidden, input_batch=batch)
        return "output"

    runner.execute_model = execute
    extension = HiddenStateExtension()
    extension.model_runner = runner
    extension.watch_tails()
    return extension, runner


def taken(extension: HiddenStateExtension) -> dict[str, list[float]]:
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(n, d)[:, 0].tolist()
        for key, n, d, data in extension.take_tails()
    }


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)[:, None].expand(-1, 2)


def test_a_tail_is_read_across_chunks_and_among_other_requests() -> None:
    extension, runner = worker()
    other = ("other", 2, 0, 2, None)
    assert runner.execute_model(step(rows(90, 91, 0, 1, 2), new=(other, ("a", 6, 0, 3, tail_of("A", 4))))) == "output"
    assert taken(extension) == {}
    runner.execute_model(step(rows(92, 3, 4, 5), running=(("other", 2, 1), ("a", 3, 3))))
    runner.execute_model(step(rows(93, 99), running=(("other", 3, 1), ("a", 6, 1))))  # decoding: past the prompt
    assert taken(extension) == {"A": [2, 3, 4, 5]}
    assert taken(extension) == {}


def test_a_tail_that_was_partly_cached_is_not_given_out() -> None:
    extension, runner = worker()
    runner.execute_model(step(rows(4, 5), new=(("a", 6, 4, 2, tail_of("A", 3)),)))
    runner.execute_model(step(rows(3, 4, 5), new=(("b", 6, 3, 3, tail_of("B", 3)),), finished=("a",)))
    assert taken(extension) == {"B": [3, 4, 5]}


def test_a_tail_that_is_computed_again_after_preemption_holds_the_newest_rows() -> None:
    extension, runner = worker()
    runner.execute_model(step(rows(0, 1, 2), new=(("a", 4, 0, 3, tail_of("A", 2)),)))
    runner.execute_model(step(rows(10, 11, 12, 13), running=(("a", 0, 4),)))
    assert taken(extension) == {"A": [12, 13]}


def test_what_is_aborted_is_forgotten_and_nothing_is_read_where_no_state_is_kept() -> None:
    extension, runner = worker()
    runner.execute_model(step(None, new=(("a", 4, 0, 4, tail_of("A", 2)),)))  # an earlier pipeline stage
    assert taken(extension) == {} and extension._tails_wanted
    runner.execute_model(step(rows(1), new=(("b", 1, 0, 1, None),), finished=("a",)))
    assert not extension._tails_wanted
