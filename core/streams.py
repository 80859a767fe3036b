"""What a stream is, and per-sample reductions over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.errors import UserError
from core.processes import Process


@dataclass(frozen=True)
class StreamSpec:
    """Static description of one stream.

    prediction: what the network outputs for it (a name of ``process.predictions``). site_axes, event_axes: names of
    the axes after the batch, e.g. ("token",) and ("channel",). weight: its share of the objective. trainable: False =
    sampled and scored but never in the loss. dof "sites-1": zero centre of mass, one site's freedom less.
    """

    name: str
    process: Process
    prediction: str
    site_axes: tuple[str, ...]
    event_axes: tuple[str, ...] = ()
    trainable: bool = True
    weight: float = 1.0
    dof: Literal["sites", "sites-1"] = "sites"

    def __post_init__(self) -> None:
        if self.prediction not in self.process.predictions:
            raise UserError(
                f"stream '{self.name}': prediction '{self.prediction}' is not one of {sorted(self.process.predictions)}"
            )

    def project(self, x: Tensor, valid: Tensor) -> Tensor:
        """Onto the zero centre of mass over valid sites, where the stream has one; identity otherwise."""
        if self.dof == "sites":
            return x
        mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)).to(x.dtype)
        axes = tuple(range(1, valid.ndim))
        mean = (x * mask).sum(axes, keepdim=True) / mask.sum(axes, keepdim=True).clamp(min=1)
        return (x - mean) * mask

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Per-sample mean of x [B, *sites, *event] over the masked sites' degrees of freedom -> float32 [B].

        Sum over event axes and masked sites, divided by (sites - 1 if centred) x event size; never over padding, never
        over the batch. float64 stays float64 (tests against closed forms).
        """
        x = x if x.dtype == torch.float64 else x.float()
        event = x[0].numel() // max(mask[0].numel(), 1)
        x = x.reshape(len(x), -1, max(event, 1))
        m = mask.reshape(len(mask), -1)
        sites = m.sum(1) - (1 if self.dof == "sites-1" else 0)
        total = torch.where(m.unsqueeze(-1), x, 0.0).sum((1, 2))
        return total / (sites.clamp(min=1) * x.shape[-1])
