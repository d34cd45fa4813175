"""Services that roll out for GRPO: several share the requests, and all compile with the weights they were sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler import checkpoint
from compiler.client import RemoteCompiler
from compiler.server.app import reloader
from configs.models import CompilerConfig, ServeConfig
from runtime.http import RemoteError
from tests import tiny_models
from tests.services import listening

ASKED = [tiny_models.request(i, image=False) for i in range(5)]


def moved(by: float):
    compiler = tiny_models.memory_compiler(False).eval()
    with torch.no_grad():
        for parameter in checkpoint.trained_parameters(compiler).values():
            parameter.add_(by)
    return compiler


def sent(compiler, folder: Path) -> Path:
    folder.mkdir(parents=True)
    checkpoint.save_weights(folder, compiler)
    return folder


def test_services_share_requests_and_take_new_weights(tmp_path):
    reload = reloader(ServeConfig(compiler=CompilerConfig(engine="hf"), adapters=str(tmp_path)))
    one, two = (tiny_models.memory_compiler(False).eval() for _ in range(2))
    with listening(one, reload=reload) as (first, _), listening(two, reload=reload) as (second, _):
        remote = RemoteCompiler([first, second])
        for version, by in ((1, 0.02), (2, -0.05)):
            newest = moved(by)
            folder = sent(newest, tmp_path / f"v{version}")
            remote.load_adapter(folder, version, newest.projector)
            made = remote.compile(ASKED)
            assert remote.hash() == checkpoint.sha256(folder)
            assert [c.request for c in made] == ASKED and {c.weight_version for c in made} == {version}
            for ours, theirs in zip(made, newest.compile(ASKED), strict=True):
                assert ours.emission_ids == theirs.emission_ids
                torch.testing.assert_close(ours.mu, theirs.mu, atol=1e-5, rtol=1e-4)
        sent(moved(0.3), tmp_path / "other")
        remote.load_adapter(tmp_path / "other", 2, newest.projector)  # a version that is there already: nothing to do
        torch.testing.assert_close(remote.compile(ASKED)[0].mu, made[0].mu)
        RemoteCompiler(first).load_adapter(tmp_path / "other", 3, newest.projector)
        with pytest.raises(RemoteError, match="different weights"):
            remote.hash()


def test_weights_come_from_the_folder_agreed_on_or_not_at_all(tmp_path):
    compiler = tiny_models.memory_compiler(False).eval()
    outside = sent(moved(0.1), tmp_path / "elsewhere")
    (tmp_path / "agreed").mkdir()
    reload = reloader(ServeConfig(compiler=CompilerConfig(engine="hf"), adapters=str(tmp_path / "agreed")))
    before = compiler.compile(ASKED[:1])[0].mu
    with listening(compiler, reload=reload) as (url, _):
        remote = RemoteCompiler(url)
        with pytest.raises(RemoteError, match=r"422.*are taken from"):
            remote.load_adapter(outside, 1, compiler.projector)
        (tmp_path / "agreed" / "broken").mkdir()
        with pytest.raises(RemoteError, match=r"422.*CheckpointError"):
            remote.load_adapter(tmp_path / "agreed" / "broken", 1, compiler.projector)
        torch.testing.assert_close(remote.compile(ASKED[:1])[0].mu, before)  # the weights before stay in force
    with listening(compiler) as (url, _), pytest.raises(RemoteError, match=r"403.*keeps the weights it has"):
        RemoteCompiler(url).load_adapter(outside, 1, compiler.projector)


def test_truncated_sampling_is_refused():
    remote = RemoteCompiler("http://127.0.0.1:9")
    remote.decoding = tiny_models.memory_compiler(False).decoding.__class__(1.0, top_k=5)
    with pytest.raises(ValueError, match="samples without truncation"):
        remote.compile(ASKED)
