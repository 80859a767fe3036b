"""Policy objectives: pure functions (log-ratio, advantage) -> value to maximise, elementwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]


def clipped(log_ratio: Tensor, advantage: Tensor, clip: float | None) -> Tensor:
    """min(rho A, clip(rho, 1 - c, 1 + c) A) (PPO, arXiv 1707.06347); clip None = rho A (no trust region)."""
    ratio = log_ratio.exp()
    if clip is None:
        return ratio * advantage
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def slope(objective: Objective, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """d objective / d log-ratio, elementwise: what the two-pass scheme multiplies each surrogate's gradient by."""
    with torch.enable_grad():
        x = log_ratio.detach().requires_grad_()
        return torch.autograd.grad(objective(x, advantage).sum(), x)[0]


@torch.no_grad()
def ratio_metrics(log_ratio: Tensor, advantage: Tensor, clip: float | None) -> dict[str, Tensor]:
    """cleanrl's names. approx_kl = (rho - 1) - log rho; clipfrac counts samples with no gradient left."""
    ratio = log_ratio.exp()
    beyond = torch.zeros_like(ratio, dtype=torch.bool)
    if clip is not None:
        beyond = ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))
    return {"ratio": ratio, "approx_kl": (ratio - 1) - log_ratio, "clipfrac": beyond.to(ratio.dtype)}
