"""Generation: noise -> grid -> sampler -> clean state. Any sampler may produce what the surrogate scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.adapter import Adapter
from core.errors import UserError
from core.kernels import Kernel
from core.processes import Gaussian
from core.rng import generator
from core.samplers import sampler_by_name, stochastic
from core.types import Conditioning, State


@dataclass(frozen=True)
class RolloutConfig:
    """sampler: a name of ``samplers.SAMPLERS``, or "stochastic" with ``kernel`` and ``noise_level``.
    n_steps: grid steps. batch: samples a network call holds."""

    sampler: str = "euler"
    n_steps: int = 10
    batch: int = 64
    kernel: str = "flow_sde"
    noise_level: float = 0.7

    def __post_init__(self) -> None:
        if self.n_steps < 1 or self.batch < 1:
            raise UserError(f"rollout.n_steps {self.n_steps} and rollout.batch {self.batch} must be 1 or more")
        if self.sampler == "stochastic":
            Kernel(self.kernel, self.noise_level)  # type: ignore[arg-type]
        else:
            sampler_by_name(self.sampler)


def generate(
    adapter: Adapter, cond: Conditioning, names: Sequence[Sequence[str | int]], config: RolloutConfig, seed: int
) -> tuple[State, Tensor]:
    """Clean state of len(cond) samples and the grid used.

    names: what each sample's randomness is called, e.g. ("rollout", iteration, group, member); equal names with equal
    geometry give equal samples, whatever the batch.
    """
    noise = adapter.draw(cond, [generator(seed, *name) for name in names])
    grid = adapter.grid(config.n_steps, cond)
    for spec in adapter.streams:
        path = spec.process if spec.prediction in ("eps", "score") else None
        if isinstance(path, Gaussian) and bool((path.coefficients(grid[0]).a == 0).any()):
            raise UserError(
                f"stream '{spec.name}' predicts {spec.prediction}, from which x0 is 0/0 at t = {float(grid[0].max())}; "
                "start the adapter's grid below that, for example at 0.999"
            )
    if config.sampler == "stochastic":
        sampler = stochastic(
            Kernel(config.kernel, config.noise_level),  # type: ignore[arg-type]
            lambda k: adapter.draw(cond, [generator(seed, *name, "step", k) for name in names]),
        )
    else:
        sampler = sampler_by_name(config.sampler)
    predict = adapter.guidance.bind(adapter, cond)
    with torch.no_grad():
        return sampler(predict, adapter.prior(noise, cond), noise, grid, adapter.streams), grid
