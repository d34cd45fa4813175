"""Soft-Mem: every loss against numbers worked out by hand, injection at the placeholders and nowhere else."""

import math

import pytest
import torch

from soft_mem.losses import gauss_nll, memory_targets, negative_entropy, orthogonality, soft_mse
from soft_mem.projector import LOG_SIGMA_RANGE, Gaussian, Projector, ProjectorConfig, check_places, inject


def gaussian(mu: float, log_sigma: float) -> Gaussian:
    return Gaussian(torch.full((1, 1, 2), mu), torch.full((1, 1, 2), log_sigma))


def test_gauss_nll_by_hand():
    # target 3, mu 1, sigma 2: -log N = 0.5 ((3-1)/2)^2 + log 2 + 0.5 log 2 pi = 0.5 + 0.6931 + 0.9189
    loss = gauss_nll(gaussian(1.0, math.log(2)), torch.full((1, 1, 2), 3.0))
    assert loss.item() == pytest.approx(0.5 + math.log(2) + 0.5 * math.log(2 * math.pi), abs=1e-6)


def test_log_prob_is_the_mean_over_dimensions_and_follows_temperature():
    g = gaussian(0.0, 0.0)
    # z = (1, 0), T = 2: mean of (0.5/4 + log 2 + c, log 2 + c) with c = 0.5 log 2 pi
    expected = -(0.0625 + math.log(2) + 0.5 * math.log(2 * math.pi))
    assert g.log_prob(torch.tensor([[[1.0, 0.0]]]), temperature=2.0).item() == pytest.approx(expected, abs=1e-6)


def test_negative_entropy_by_hand():
    # -(0.5 log(2 pi e) + log 2) = -(1.4189 + 0.6931)
    assert negative_entropy(gaussian(7.0, math.log(2))).item() == pytest.approx(-1.4189385 - 0.6931472, abs=1e-6)


def test_soft_mse_by_hand():
    assert soft_mse(torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, 1.0]]])).item() == pytest.approx((1 + 4) / 2)


def test_orthogonality_by_hand():
    h_soft = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])  # mean (1, 1)
    h_text = torch.tensor([[[-3.0, 0.0], [100.0, 100.0]]], requires_grad=True)  # the second is padding: mean (-3, 0)
    loss = orthogonality(h_soft.requires_grad_(), h_text, torch.tensor([[1, 0]]))
    assert loss.item() == pytest.approx(1 / math.sqrt(2), abs=1e-6)  # |cos 135 degrees|
    loss.backward()
    assert h_text.grad is None and h_soft.grad is not None


def test_injection_hits_the_placeholders_only_and_is_differentiable():
    tokens = torch.tensor([[5, 9, 9, 1], [9, 3, 9, 2]])
    embeddings = torch.arange(16.0).reshape(2, 4, 2)
    soft = -torch.arange(8.0).reshape(2, 2, 2).requires_grad_()
    out = inject(embeddings, tokens, 9, soft)
    assert torch.equal(out[0, 1:3], soft[0]) and torch.equal(out[1, [0, 2]], soft[1])
    assert torch.equal(out[tokens != 9], embeddings[tokens != 9])
    check_places(tokens.tolist(), 9, (2, 2))
    for placeholder, n in ((3, (2, 2)), (9, (2, 1)), (9, (1, 1))):
        with pytest.raises(ValueError, match="placeholders"):
            check_places(tokens.tolist(), placeholder, n)


def test_memory_targets_by_hand():
    table = torch.tensor([[1.0, 0.0], [0.0, 2.0], [4.0, 4.0]])
    # rows 0,1,2 in two chunks: (0,1) -> (1,2)/sqrt 2, (2) -> (4,4); all over emb_std 0.5
    target = memory_targets(table, 2, 0.5)
    torch.testing.assert_close(target, torch.tensor([[2 / 2**0.5, 4 / 2**0.5], [8.0, 8.0]]))
    assert torch.equal(memory_targets(table[:1], 2, 0.5)[1], torch.zeros(2))


def test_projector_shapes_bounds_and_linear_ablation():
    h = torch.randn(3, 4, 8) * 50
    for kind in ("gaussian", "linear"):
        projector = Projector(ProjectorConfig(8, 6, 4, kind))
        g = projector(h)
        assert g.mu.shape == g.log_sigma.shape == (3, 4, 6)
        assert LOG_SIGMA_RANGE[0] <= g.log_sigma.min() and g.log_sigma.max() <= LOG_SIGMA_RANGE[1]
        assert torch.equal(projector.draw(g, 0.0), g.mu)
        if kind == "linear":
            assert torch.equal(projector.draw(g, 1.0), g.mu)
    assert projector.to_embeddings(torch.ones(1)).item() == pytest.approx(0.0261)


def test_a_projector_that_normalises_reads_directions_not_lengths():
    """Without, mu grows with the gains of the compiler's final norm: 730 was seen, in units of an embedding."""
    torch.manual_seed(0)
    plain = Projector(ProjectorConfig(64, 48, 4))
    ours = Projector(ProjectorConfig(64, 48, 4, normalise=True))
    ours.load_state_dict(plain.state_dict())
    hidden = 5 * torch.randn(2, 4, 64)
    torch.testing.assert_close(ours(1000 * hidden).mu, ours(hidden).mu, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plain(1000 * hidden).mu, 1000 * plain(hidden).mu, atol=1e-2, rtol=1e-4)
    assert ours(hidden).mu.square().mean().sqrt().item() == pytest.approx(1, rel=0.15)
    unit = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(ours(hidden).mu, plain(unit).mu, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours(torch.zeros(1, 4, 64)).mu, torch.zeros(1, 4, 48))  # and nothing is divided by nothing
    assert torch.isfinite(ours(1e4 * hidden.bfloat16()).mu).all()


def test_projectors_of_before_do_not_normalise():
    assert not ProjectorConfig(**{"d_compiler": 8, "d_executor": 8, "n_tokens": 4, "kind": "gaussian"}).normalise
