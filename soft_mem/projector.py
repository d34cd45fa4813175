"""Soft-Mem's projector f_phi (paper Eq. 5): from compiler hidden states to soft tokens in the executor's embeddings.

All Gaussian quantities are in normalised units, z = soft / emb_std, so that losses and log-probabilities do not depend
on the executor's embedding scale. emb_std is 0.0261 in the paper, or the standard deviation of the embedding table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

LOG_SIGMA_RANGE = (-5.0, 2.0)


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """Shape and initialisation of a projector."""

    d_compiler: int
    d_executor: int
    n_tokens: int = 16
    kind: Literal["gaussian", "linear"] = "gaussian"
    emb_std: float = 0.0261
    init_log_sigma: float = -1.0
    normalise: bool = False  # divide hidden states by their root mean square


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Distribution of the soft tokens: mu and log sigma, each (B, N, d_executor), in normalised units."""

    mu: Tensor
    log_sigma: Tensor

    def at(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute z = mu + T sigma noise, differentiable in mu and sigma."""
        return self.mu + temperature * self.log_sigma.exp() * noise

    def log_prob(self, z: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the mean log-density of z per dimension at std T*sigma: (B, N), fp32.

        A ratio of its exponentials is the d-th root of the density ratio, d the number of dimensions. (With the sum,
        which is the density's logarithm, one update saturates every clip.)
        """
        mu, log_sigma = self.mu.float(), self.log_sigma.float() + math.log(temperature)
        square = ((z.float() - mu) * torch.exp(-log_sigma)) ** 2
        return -0.5 * (square + 2 * log_sigma + math.log(2 * math.pi)).mean(-1)


class Projector(nn.Module):
    """One linear map W_p: h (B, N, d_compiler) -> (mu, log sigma), or mu alone for the `linear` ablation (Table 4).

    W_p is initialised so that mu is as large as h. With `normalise`, h is divided by its root mean square, so that mu
    starts at about 1, the size of an embedding in normalised units, for any gain of the compiler's final norm.
    """

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.config = config
        outputs = 2 if config.kind == "gaussian" else 1
        self.linear = nn.Linear(config.d_compiler, outputs * config.d_executor)
        with torch.no_grad():
            self.linear.weight.normal_(std=config.d_compiler**-0.5)
            self.linear.bias.zero_()
            if config.kind == "gaussian":  # sigma starts constant
                self.linear.weight[config.d_executor :].zero_()
                self.linear.bias[config.d_executor :].fill_(config.init_log_sigma)

    def forward(self, hidden: Tensor) -> Gaussian:
        """Compute the distribution of the soft tokens. The linear projector has a fixed, tiny sigma."""
        if self.config.normalise:
            hidden = hidden.float()
            hidden = hidden * torch.rsqrt((hidden**2).mean(-1, keepdim=True) + 1e-6)
        out = self.linear(hidden.to(self.linear.weight.dtype))
        if self.config.kind == "linear":
            return Gaussian(out, torch.full_like(out, LOG_SIGMA_RANGE[0]))
        mu, log_sigma = out.chunk(2, dim=-1)
        return Gaussian(mu, log_sigma.clamp(*LOG_SIGMA_RANGE))

    def noise(self, gaussian: Gaussian, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Sample the noise (B, N, d_executor) of soft tokens; zeros at temperature 0 and for the linear projector."""
        mu = gaussian.mu
        if temperature == 0 or self.config.kind == "linear":
            return torch.zeros_like(mu)
        return torch.randn(mu.shape, generator=generator, device=mu.device, dtype=mu.dtype)

    def draw(self, gaussian: Gaussian, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Sample z (B, N, d_executor) in normalised units (reparameterised)."""
        return gaussian.at(self.noise(gaussian, temperature, generator), temperature)

    def to_embeddings(self, z: Tensor) -> Tensor:
        """Scale z from normalised units to the executor's embeddings."""
        return z * self.config.emb_std


def inject(embeddings_BTd: Tensor, tokens_BT: Tensor, placeholder: int, soft_BNd: Tensor) -> Tensor:
    """Replace each row's N placeholders by its soft tokens (at the executor's scale), in order. Differentiable.

    Call `check_places` first: counting here would synchronise the GPU.
    """
    mask = (tokens_BT == placeholder).unsqueeze(-1).expand_as(embeddings_BTd)
    return embeddings_BTd.masked_scatter(mask, soft_BNd.to(embeddings_BTd))


def check_places(rows: Sequence[Sequence[int]], placeholder: int, n_soft: Sequence[int]) -> None:
    """Raise ValueError unless every row of token ids has one placeholder per soft token."""
    counts = [row.count(placeholder) for row in rows]
    if counts != list(n_soft):
        raise ValueError(f"the rows need {list(n_soft)} placeholders of soft tokens, but have {counts}")
