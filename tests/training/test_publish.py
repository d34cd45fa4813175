"""Publishing: what would go to the hub, and what would not."""

import json
from typing import ClassVar

import huggingface_hub
import pytest

from compiler.checkpoint import CheckpointError
from training.checkpoint import push


class FakeHub:
    calls: ClassVar[list] = []

    def create_repo(self, repo, **kwargs):
        self.calls.append(("create", repo, kwargs))

    def upload_folder(self, **kwargs):
        self.calls.append(("folder", kwargs))

    def upload_file(self, **kwargs):
        self.calls.append(("file", kwargs))


def test_push_uploads_the_checkpoint_with_a_card_and_without_the_optimiser(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"stage": "sft", "step": 3, "executor_hash": "abc"}))
    (folder / "projector.json").write_text(json.dumps({"n_tokens": 16}))
    push(tmp_path, "someone/compiler")
    (_, repo, options), (_, upload), (_, card) = FakeHub.calls
    assert repo == "someone/compiler" and options["private"] is True
    assert upload["folder_path"] == str(folder) and "optimizer.safetensors" in upload["ignore_patterns"]
    text = card["path_or_fileobj"].decode()
    assert "| executor_hash | abc |" in text and "| n_tokens | 16 |" in text and str(tmp_path) not in text


def test_push_of_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        push(tmp_path, "someone/compiler")
