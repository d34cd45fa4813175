"""Soft-Mem's projector f_phi (paper Eq. 5): compiler hidden states -> soft tokens in the executor's embedding space.

All Gaussian quantities live in NORMALISED units, z = soft / emb_std, so that losses and log-probabilities do not depend
on the executor's embedding scale. emb_std is 0.0261 in the paper, or the measured std of the embedding table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

LOG_SIGMA_RANGE = (-5.0, 2.0)


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    d_compiler: int
    d_executor: int
    n_tokens: int = 16
    kind: Literal["gaussian", "linear"] = "gaussian"
    emb_std: float = 0.0261
    init_log_sigma: float = -1.0


@dataclass(frozen=True, slots=True)
class Gaussian:
    """mu and log sigma of the soft tokens, each (B, N, d_executor), in normalised units."""

    mu: Tensor
    log_sigma: Tensor

    def at(self, noise: Tensor, temperature: float = 1.0) -> Tensor:
        """z = mu + T sigma noise, differentiable in mu and sigma."""
        return self.mu + temperature * self.log_sigma.exp() * noise

    def log_prob(self, z: Tensor, temperature: float = 1.0) -> Tensor:
        """(B, N): MEAN over dimensions of the log-density of z at std T*sigma, fp32.

        The mean, not the sum: with the sum one update saturates every clip (design notes, measured).
        """
        mu, log_sigma = self.mu.float(), self.log_sigma.float() + math.log(temperature)
        square = ((z.float() - mu) * torch.exp(-log_sigma)) ** 2
        return -0.5 * (square + 2 * log_sigma + math.log(2 * math.pi)).mean(-1)


class Projector(nn.Module):
    """One linear map W_p: h (B, N, d_compiler) -> (mu, log sigma), or mu alone for the `linear` ablation (Table 4)."""

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.config = config
        outputs = 2 if config.kind == "gaussian" else 1
        self.linear = nn.Linear(config.d_compiler, outputs * config.d_executor)
        with torch.no_grad():
            self.linear.weight.normal_(std=config.d_compiler**-0.5)
            self.linear.bias.zero_()
            if config.kind == "gaussian":  # sigma starts the same everywhere, whatever h is
                self.linear.weight[config.d_executor :].zero_()
                self.linear.bias[config.d_executor :].fill_(config.init_log_sigma)

    def forward(self, hidden: Tensor) -> Gaussian:
        """Parameters of the soft tokens. The linear projector has a fixed, vanishing sigma."""
        out = self.linear(hidden.to(self.linear.weight.dtype))
        if self.config.kind == "linear":
            return Gaussian(out, torch.full_like(out, LOG_SIGMA_RANGE[0]))
        mu, log_sigma = out.chunk(2, dim=-1)
        return Gaussian(mu, log_sigma.clamp(*LOG_SIGMA_RANGE))

    def noise(self, gaussian: Gaussian, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise (B, N, d_executor) of the soft tokens; zeros at temperature 0 and for the linear projector,
        which is deterministic."""
        mu = gaussian.mu
        if temperature == 0 or self.config.kind == "linear":
            return torch.zeros_like(mu)
        return torch.randn(mu.shape, generator=generator, device=mu.device, dtype=mu.dtype)

    def draw(self, gaussian: Gaussian, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """z (B, N, d_executor) in normalised units (reparameterised)."""
        return gaussian.at(self.noise(gaussian, temperature, generator), temperature)

    def to_embeddings(self, z: Tensor) -> Tensor:
        """Normalised units -> the executor's embedding scale."""
        return z * self.config.emb_std
