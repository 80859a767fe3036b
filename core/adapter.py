"""The one thing a new modality writes: how requests become conditions, what the network predicts, how samples look."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from core.guidance import Guidance
from core.schedules import linear_grid
from core.streams import StreamSpec
from core.types import Conditioning, Field, Noise, Predictions, Request, Sample, State


@dataclass(frozen=True)
class Layout:
    """The shape of one stream of a batch.

    sites: the true site shape of each sample (ragged allowed). event: the shape of one site.
    given: values [B, *sites, *event] of the sites the policy does not produce, with acted [B, *sites] saying which
    sites it does; None = it produces all of them.
    """

    sites: Sequence[tuple[int, ...]]
    event: tuple[int, ...] = ()
    acted: Tensor | None = None
    given: Tensor | None = None

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(max(sizes) for sizes in zip(*self.sites, strict=True))

    def valid(self, device: torch.device | str = "cpu") -> Tensor:
        mask = torch.zeros(len(self.sites), *self.padded, dtype=torch.bool, device=device)
        for row, sites in enumerate(self.sites):
            mask[box(row, sites)] = True
        return mask


@dataclass
class Counter:
    """Network evaluations, in samples (one sample through one forward = 1)."""

    evaluations: int = 0


class Adapter(ABC):
    """One model family. Subclasses write the abstract methods; the rest is derived from the streams' processes."""

    streams: tuple[StreamSpec, ...]
    guidance: Guidance = Guidance()
    device: torch.device = torch.device("cpu")
    autocast_dtype: torch.dtype | None = None  # None = the network's own dtype, no autocast

    # ---- what a modality writes ----

    @abstractmethod
    def encode(self, requests: Sequence[Request]) -> Conditioning:
        """Requests -> what the network is conditioned on, geometry included."""

    @abstractmethod
    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        """Stream name -> shape, from the geometry."""

    @abstractmethod
    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        """The network. t: [B], canonical; map it to the model's own convention here and only here."""

    @abstractmethod
    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        """What a reward looks at, one per sample; a sample that cannot be decoded is Sample(ok=False), not an error."""

    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """The networks that may be trained, by name."""

    # ---- derived; override only where the model's maths needs it ----

    def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
        """The sampling grid [n + 1] for this conditioning (dynamic shifts read the geometry)."""
        return linear_grid(n_steps)

    def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
        """Base randomness, one generator per sample, so padding and batching never change it."""
        noise: Noise = {}
        for spec in self.streams:
            layout = self.layout(cond)[spec.name]
            rows = [
                spec.process.draw((*sites, *layout.event), g) for sites, g in zip(layout.sites, generators, strict=True)
            ]
            out = rows[0].new_zeros(len(rows), *layout.padded, *rows[0].shape[len(layout.padded) :])
            for row, (x, sites) in enumerate(zip(rows, layout.sites, strict=True)):
                out[box(row, sites)] = x
            noise[spec.name] = spec.project(out, layout.valid()).to(self.device)
        return noise

    def prior(self, noise: Noise, cond: Conditioning) -> State:
        """The state at t = 1. Sites the policy does not produce hold their given value."""
        state: State = {}
        layouts = self.layout(cond)
        for spec in self.streams:
            layout = layouts[spec.name]
            valid = layout.valid(self.device)
            acted = valid if layout.acted is None else layout.acted.to(self.device) & valid
            value = spec.process.prior(noise[spec.name])
            rest = torch.zeros_like(value) if layout.given is None else layout.given.to(value)
            state[spec.name] = Field(hold(acted, value, rest), valid, acted)
        return state

    def perturb(self, clean: State, noise: Noise, t: Tensor, cond: Conditioning) -> State:
        """The noisy state at t [B]; deterministic. Sites that are not acted stay clean."""
        return {
            spec.name: clean[spec.name].with_value(
                hold(
                    clean[spec.name].acted,
                    spec.process.perturb(clean[spec.name].value, noise[spec.name], t),
                    clean[spec.name].value,
                )
            )
            for spec in self.streams
        }

    def export(self, folder: Path) -> None:
        """Write the trained weights in the ecosystem's own format; by default one safetensors file per module."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, module in self.modules().items():
            tensors = {k: p.detach().cpu().contiguous() for k, p in module.named_parameters() if p.requires_grad}
            save_file(tensors, folder / f"{name}.safetensors")

    def fingerprint(self) -> str:
        """What encoded conditions depend on besides the request; part of the cache's key."""
        return type(self).__name__

    def release_encoders(self) -> None:
        """Called once all prompts are encoded: free what only ``encode`` needs."""

    # ---- the only door to the network ----

    @cached_property
    def counter(self) -> Counter:
        return Counter()

    def forward(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        """predict, in the run's dtype, projected, float32 out, counted."""
        self.counter.evaluations += len(t)
        enabled = self.autocast_dtype is not None
        with torch.autocast(self.device.type, dtype=self.autocast_dtype or torch.bfloat16, enabled=enabled):
            out = self.predict(noisy, t, cond, branch)
        return {
            spec.name: spec.project(
                out[spec.name] if out[spec.name].dtype == torch.float64 else out[spec.name].float(),
                noisy[spec.name].valid,
            )
            for spec in self.streams
        }


def box(row: int, sites: Sequence[int]) -> tuple[Any, ...]:
    """The index of one sample's true sites in a padded batch."""
    return (row, *(slice(0, n) for n in sites))


def hold(acted: Tensor, value: Tensor, otherwise: Tensor) -> Tensor:
    """value where acted, else the other; acted [B, *sites] is broadcast over the event axes."""
    return torch.where(acted.reshape(acted.shape + (1,) * (value.ndim - acted.ndim)), value, otherwise)
