"""Stochastic transition kernels N(w0 x0_hat + w1 eps_hat, s^2) as one object (research notes, methods.md section 0).

flow_sde: Flow-GRPO (arXiv 2505.05470). dance_sde: DanceGRPO (2505.07818). cps: FlowCPS (2509.05952). ode: s = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.errors import UserError
from core.processes import Gaussian, RectifiedFlow, expand

KERNELS = ("ode", "flow_sde", "dance_sde", "cps")


@dataclass(frozen=True)
class Kernel:
    """One step's conditional law given (x0_hat, eps_hat) at t.

    noise_level: Flow-SDE's a, Dance's eta, CPS's eta in [0, 1]. t_max: what Flow-SDE puts for t in 1 - t at t = 1
    (the second grid point; the published code's rule), needed only there.
    score: "density" is the Gaussian log-density; "unscaled" is minus the squared distance, which FlowCPS uses and which
    is not a density.
    """

    name: Literal["ode", "flow_sde", "dance_sde", "cps"] = "flow_sde"
    noise_level: float = 0.7
    score: Literal["density", "unscaled"] = "density"

    def __post_init__(self) -> None:
        if self.name not in KERNELS:
            raise UserError(f"kernel '{self.name}' is unknown; choose one of {', '.join(KERNELS)}")
        if self.noise_level < 0:
            raise UserError(f"noise_level {self.noise_level} is negative; use 0 or more")

    @property
    def deterministic(self) -> bool:
        return self.name == "ode" or self.noise_level == 0

    def coefficients(
        self, process: Gaussian, t: Tensor, t_next: Tensor, t_max: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(w0, w1, s), each of t's shape. t_next < t. The SDE kernels are derived for rectified flow only."""
        after = process.coefficients(t_next)
        if self.deterministic:
            return after.a, after.s, torch.zeros_like(t)
        if self.name == "cps":
            angle = self.noise_level * math.pi / 2
            return after.a, after.s * math.cos(angle), after.s * math.sin(angle)
        if not isinstance(process, RectifiedFlow):
            raise UserError(f"kernel '{self.name}' holds for rectified flow only; use cps for {type(process).__name__}")
        step = t - t_next
        sigma = torch.full_like(t, self.noise_level)
        if self.name == "flow_sde":
            below = t if t_max is None else torch.where(t >= 1, torch.as_tensor(t_max, dtype=t.dtype), t)
            sigma = self.noise_level * torch.sqrt(t / (1 - below))
        return after.a, after.s - sigma.square() * step / (2 * t), sigma * step.sqrt()

    def mean_std(
        self, process: Gaussian, x0: Tensor, eps: Tensor, t: Tensor, t_next: Tensor, t_max: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean [B, ...] and std [B] of the next value."""
        w0, w1, s = self.coefficients(process, t, t_next, t_max)
        return expand(w0, x0) * x0 + expand(w1, x0) * eps, s

    def log_prob(self, value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Elementwise score [B, ...]; reduce it with ``StreamSpec.mean`` (published clip ranges assume the mean)."""
        square = (value - mean).square()
        if self.score == "unscaled":
            return -square
        if bool((std <= 0).any()):
            raise UserError(
                "a deterministic step has no density; score only steps with noise, or use an ELBO likelihood"
            )
        std = expand(std, value)
        return -square / (2 * std.square()) - torch.log(std) - 0.5 * math.log(2 * math.pi)
