"""Rows that share a prefix have the states and gradients of rows that are read whole."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers
from PIL import Image

from compiler.hf import MemoryCompiler
from configs.models import Lora
from lm.attention import attends_beside, share_heads
from lm.backbone import Backbone
from lm.prompt import Prompt, PromptPart
from lm.shared_prefixes import best_groups, find_prefixes, read_rows, tokens_read
from soft_mem.projector import Projector, ProjectorConfig
from tests import tiny_models, tiny_vlms

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
PLAIN = ("Qwen2", "Llama", "Qwen3")
BESIDE = " beside"  # with the CPU's attention to prefixes that are not repeated
EVERY = [(name, False) for name in (*PLAIN, "zoo", *tiny_vlms.FAMILIES, "Qwen2 beside", "llava beside")]


def backbone(family: str) -> Backbone:
    """Create a tiny model; `zoo` is Qwen2.5-VL, the others that are not plain are `tiny_vlms`."""
    name = family.removesuffix(BESIDE)
    if name == "zoo":
        return tiny_models.vlm_backbone()
    torch.manual_seed(0)
    tokenizer = tiny_models.tokenizer()
    if name in PLAIN:
        kind, sizes = getattr(transformers, f"{name}Config"), SIZES | HEADS
        config = kind(vocab_size=len(tokenizer), initializer_range=0.2, **sizes)
        made = Backbone(getattr(transformers, f"{name}ForCausalLM")(config).eval(), tokenizer)
    else:
        made = tiny_vlms.backbone(name)
    if family != name:
        share_heads(made.model)
        assert attends_beside(made.model.config.get_text_config())
    return made


def compiler(family: str, dtype: torch.dtype = torch.float32, recompute: bool = False) -> MemoryCompiler:
    base = backbone(family)
    base.model.to(dtype)
    made = MemoryCompiler(base, Projector(ProjectorConfig(64, 64, 4)), lora=Lora(rank=4)).eval()
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # 0 in a fresh adapter: A would get no gradient
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if recompute:
        base.enable_gradient_checkpointing()
    return made


def prompts(base: Backbone) -> list[Prompt]:
    """Create rows of two episodes and one that is alone, out of order; a model that sees has pictures in the memory of
    the first, and behind."""
    picture = lambda i: [PromptPart(image=Image.new("RGB", (64, 64), (i, 90, 200)))] if base.is_vlm else []

    def prompt(episode: int, t: int) -> Prompt:
        seen = picture(9) if episode == 0 else []
        memory = [PromptPart(f"in home {episode}: put a mug in shelf {episode}\n" * 3), *seen, PromptPart(" now ")]
        view = picture(40 * t) if t % 2 else []
        return base.encode([*memory, PromptPart("you see a mug " * (1 + t) + f"{t} "), *view], "find")

    return [prompt(*row) for row in ((0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (0, 3))]


def scored(model: MemoryCompiler, sharing: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities of emissions, and the gradients of a loss on text and soft tokens."""
    rows, texts = prompts(model.backbone), ("> a | go to shelf 1", ".", "> it is there | look")
    emissions = [model.emission_ids(texts[i % 3]) for i in range(len(rows))]
    scores = model.score(rows, emissions, sharing)  # type: ignore[arg-type]
    logprobs = scores.logits.float().log_softmax(-1).gather(2, scores.targets[..., None]).squeeze(-1) * scores.text_mask
    weights = torch.randn(scores.gaussian.mu.shape, generator=torch.Generator().manual_seed(0))
    (logprobs.sum() + (weights * scores.gaussian.mu).sum() + (scores.h_text**2).mean()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("lora_A" in name for name in found) and any(name.startswith("projector") for name in found)
    return logprobs.detach(), found


@pytest.mark.parametrize(("family", "recompute"), [*EVERY, ("Qwen2", True), ("llava", True), ("Qwen2 beside", True)])
def test_gradients_are_those_of_whole_rows(family, recompute):
    plain, gradients = scored(compiler(family, recompute=recompute), "never")
    shared, others = scored(compiler(family, recompute=recompute), "always")
    torch.testing.assert_close(shared, plain, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        apart = (others[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)
        assert apart < 1e-5, (name, float(apart))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen2 beside"])
def test_in_bfloat16_gradients_agree_as_far_as_it_rounds(family):
    exact = scored(compiler(family), "never")[1]
    away = lambda found: sum(float((found[n].float() - exact[n]).norm() / exact[n].norm()) for n in exact) / len(exact)
    plain, shared = (away(scored(compiler(family, torch.bfloat16), s)[1]) for s in ("never", "always"))
    assert 0 < shared < 1.5 * plain


def test_layers_that_are_computed_again_read_the_prefix_that_they_had():
    """Each of both passes runs once more; without it nothing is computed twice."""
    runs = []
    for recompute in (False, True):
        model = compiler("Qwen2", recompute=recompute)
        ran = [0]
        model.backbone.body.layers[1].mlp.register_forward_hook(lambda *_, ran=ran: ran.__setitem__(0, ran[0] + 1))
        scored(model, "always")
        runs.append(ran[0])
    assert runs == [2, 4]


@pytest.mark.parametrize("name", ["MistralConfig", "gemma3"])
def test_a_model_that_does_not_attend_to_everything_reads_whole_rows(name):
    """A sliding window; pictures whose tokens see one another."""
    base = backbone("gemma3") if name == "gemma3" else tiny_models.lm_backbone()
    if name == "MistralConfig":
        config = transformers.MistralConfig(
            vocab_size=len(base.tokenizer), sliding_window=16, head_dim=32, **SIZES, **HEADS
        )
        base = Backbone(transformers.MistralForCausalLM(config).eval(), base.tokenizer)
    rows = prompts(base)
    with torch.no_grad():
        plain, shared = (read_rows(base, rows, [(5, 6)] * len(rows), sharing) for sharing in ("never", "always"))
    assert shared.skipped == (0,) * len(rows) and torch.equal(plain.hidden, shared.hidden)


def test_attention_that_does_not_read_the_prefix_does_not_fit_its_mask_and_gives_no_number(monkeypatch):
    base = backbone("Qwen2 beside")
    copied = lambda self, keys, values, *args, **kwargs: (keys.clone(), values)
    monkeypatch.setattr("lm.graph_cache._Beside.update", copied)
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match the size"):
        read_rows(base, prompts(base), [(5, 6)] * 6, "always")


def test_prefixes_are_read_once_only_where_that_is_shorter():
    base = backbone("Qwen2")
    rows = [Prompt((*range(10, 30), i, 5)) for i in (40, 50, 60)]
    skipped = lambda rows: read_rows(base, rows, [(5, 6)] * len(rows), "if_shorter").skipped
    with torch.no_grad():
        assert skipped(rows) == (20, 20, 20)
        assert skipped(rows[:1]) == (0,)
        assert skipped([Prompt((i, *range(10, 30))) for i in (40, 50, 60)]) == (0, 0, 0)
        assert read_rows(base, rows[:1], [(5, 6)], "always").skipped == (21,)  # all but the prompt's last token


def test_prefixes_of_a_batch_by_hand():
    """Rows 0 and 2 share five tokens, rows 1, 3 and 4 three; row 5 is alone, and is cut where it leaves no more to read
    than the longest rest."""
    base = backbone("Qwen2")
    ids = [(9, 8, 7, 6, 5, 1, 1), (20, 21, 22, 1), (9, 8, 7, 6, 5, 2), (20, 21, 22, 2, 2), (20, 21, 22, 3)]
    rows = [*map(Prompt, ids), Prompt(tuple(range(30, 40)))]
    found = sorted((sorted(prefix.rows), prefix.tokens) for prefix in find_prefixes(base, rows))
    assert found == [([0, 2], 5), ([1, 3, 4], 3), ([5], 5)]
    assert tokens_read(find_prefixes(base, rows), rows) == 3 * 5 + 6 * 5


def test_best_groups_are_the_best_of_all():
    rng = random.Random(0)
    for _ in range(200):
        shared = [rng.randint(0, 9) for _ in range(rng.randint(0, 6))]
        n = len(shared) + 1
        saved = lambda groups, shared=shared: sum((j - i) * min(shared[i:j], default=0) for i, j in groups)
        found = best_groups(shared)
        assert [i for first, last in found for i in range(first, last + 1)] == list(range(n))
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        every = [list(zip((0, *cut), (*(c - 1 for c in cut), n - 1), strict=True)) for cut in cuts]
        assert saved(found) == max(map(saved, every))
