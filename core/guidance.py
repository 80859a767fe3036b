"""Guidance belongs to the sampler (or, when embedded, to the conditioning); it is no part of the likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from core.errors import UserError
from core.types import Conditioning, Predict, Predictions, State

if TYPE_CHECKING:
    from core.adapter import Adapter


@dataclass(frozen=True)
class Guidance:
    """How a sampler combines the network's branches.

    none: conditional only. cfg: null + scale (cond - null) (arXiv 2207.12598), with ``rescale`` in [0, 1] pulling the
    result back to the conditional norm (arXiv 2305.08891). embedded: the scale is an input, set by the adapter's
    ``encode``; the sampler does nothing, and rollout and surrogate see the same value.
    """

    mode: Literal["none", "cfg", "embedded"] = "none"
    scale: float = 1.0
    rescale: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("none", "cfg", "embedded"):
            raise UserError(f"guidance mode '{self.mode}' is unknown; choose none, cfg or embedded")

    def bind(self, adapter: Adapter, cond: Conditioning) -> Predict:
        """The function a sampler calls."""
        if self.mode != "cfg" or self.scale == 1.0:
            return lambda noisy, t: adapter.forward(noisy, t, cond)

        def guided(noisy: State, t: Tensor) -> Predictions:
            positive = adapter.forward(noisy, t, cond)
            negative = adapter.forward(noisy, t, cond, branch="null")
            return {name: self._combine(positive[name], negative[name], noisy[name].valid) for name in positive}

        return guided

    def _combine(self, positive: Tensor, negative: Tensor, valid: Tensor) -> Tensor:
        out = negative + self.scale * (positive - negative)
        if self.rescale == 0:
            return out
        ratio = _std(positive, valid) / _std(out, valid).clamp(min=1e-8)
        return torch.lerp(out, out * ratio, self.rescale)


def _std(x: Tensor, valid: Tensor) -> Tensor:
    """Per-sample std over valid sites and their events, keeping the axes; padding does not count."""
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)).expand_as(x)
    axes = tuple(range(1, x.ndim))
    n = mask.sum(axes, keepdim=True).clamp(min=1)
    mean = torch.where(mask, x, 0.0).sum(axes, keepdim=True) / n
    return torch.sqrt(torch.where(mask, x - mean, 0.0).square().sum(axes, keepdim=True) / n)
