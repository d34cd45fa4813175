"""The pretended device itself: it refuses what CUDA refuses, and counts host synchronisations."""

from __future__ import annotations

import os

import pytest
import torch

from tests.pretend_gpu import counting


def test_it_computes_what_the_cpu_computes() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    here = x.to("cuda")
    assert here.device == torch.device("cuda:0") and torch.cuda.is_available()
    assert torch.equal((here @ here.T).softmax(-1).cpu(), (x @ x.T).softmax(-1))


def test_it_refuses_what_cuda_refuses() -> None:
    here = torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        here + torch.ones(2, 2)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        here.numpy()
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.multinomial(here, 1, generator=torch.Generator())
    with pytest.raises(RuntimeError, match=r"not implemented for 'torch\.int64'"):
        here.long() @ here.long()
    if (child := os.fork()) == 0:
        try:
            here + 1
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_synchronisations_are_counted_by_kind_and_call_site() -> None:
    here = torch.arange(4, device="cuda")
    with counting() as syncs:
        here + 1  # none: a number of Python's
        here.sum().item()
        here.cpu()
        here[[0, 1]]
        here[here > 1]
        torch.zeros(2).to("cuda")
    kinds = [kind for kind, _ in syncs.sites]
    assert sorted(kinds) == ["d2h", "h2d", "h2d", "item", "shape"], str(syncs)
    assert all("tests/pretended/test_device.py" in site for _, site in syncs.sites)
