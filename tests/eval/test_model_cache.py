"""Cells that differ in the seed share their compiler, which draws as if it had been loaded for each."""

from types import SimpleNamespace

import torch

from configs.evaluation import EvalConfig
from configs.models import CompilerConfig
from eval.model_cache import ModelCache


def test_a_sampling_compiler_is_loaded_once_and_seeded_for_each_cell(monkeypatch) -> None:
    loaded = []

    def load(_: ModelCache, config: EvalConfig) -> SimpleNamespace:
        loaded.append(config.seed)
        return SimpleNamespace(generator=torch.Generator().manual_seed(config.seed))

    monkeypatch.setattr(ModelCache, "_load_compiler", load)
    compiler = CompilerConfig(checkpoint="zoo/alfworld/checkpoint", temperature=0.7)
    cells = [EvalConfig(compiler=compiler, deliveries=("compiled",), seed=seed) for seed in (3, 4, 3)]
    drawn = list[list[float]]()
    with ModelCache() as models:
        for cell in cells:
            shared = models.compiler(cell)
            drawn.append(torch.rand(4, generator=shared.generator).tolist())  # type: ignore[union-attr]
    assert loaded == [3]
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[1] == torch.rand(4, generator=torch.Generator().manual_seed(4)).tolist()
