"""Grids for sampling, time laws for the surrogate, and stratified selection from either.

A grid is float32 [n + 1] (or [n + 1, B] when samples differ), falling from near 1 to 0. A sampler takes a grid and
never builds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import UserError


def _check_steps(n_steps: int) -> None:
    if n_steps < 1:
        raise UserError(f"n_steps is {n_steps}; a sampling grid needs at least 1 step")


def append_zero(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def linear_grid(n_steps: int) -> Tensor:
    """linspace(1, 1/n, n) and 0: the base grid of FLUX and most flow models."""
    _check_steps(n_steps)
    return append_zero(torch.linspace(1.0, 1.0 / n_steps, n_steps, dtype=torch.float64)).float()


def explicit_grid(sigmas: Sequence[float]) -> Tensor:
    """Any strictly falling list in [0, 1]; a final 0 is added when missing."""
    grid = torch.tensor(list(sigmas), dtype=torch.float32)
    falls = bool(torch.isfinite(grid).all()) and bool((grid[1:] < grid[:-1]).all())
    if len(grid) == 0 or not falls or not 0 < float(grid[0]) <= 1 or float(grid[-1]) < 0:
        raise UserError(f"sigmas must fall strictly within [0, 1], got {list(sigmas)[:8]}")
    return grid if float(grid[-1]) == 0 else append_zero(grid)


def static_shift(sigma: Tensor, shift: float) -> Tensor:
    """s sigma / (1 + (s - 1) sigma): SD3 (arXiv 2403.03206)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def exponential_shift(sigma: Tensor, mu: float | Tensor) -> Tensor:
    """e^mu / (e^mu + 1/sigma - 1): FLUX's dynamic shift; 0 stays 0."""
    e = torch.exp(torch.as_tensor(mu, dtype=torch.float64)).to(sigma.dtype)
    return e / (e + (1 / sigma - 1))


def linear_type_shift(sigma: Tensor, mu: float) -> Tensor:
    """mu / (mu + 1/sigma - 1): diffusers' time_shift_type "linear"; the static shift under its other name."""
    return static_shift(sigma, mu)


def linear_mu(
    tokens: float, base_tokens: int = 256, max_tokens: int = 4096, base_shift: float = 0.5, max_shift: float = 1.15
) -> float:
    """mu linear in the number of latent tokens; defaults are FLUX.1-dev's."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return slope * tokens + base_shift - slope * base_tokens


def flux2_mu(tokens: int, n_steps: int) -> float:
    """FLUX.2's empirical mu: two linear fits in the tokens (10 and 200 steps), interpolated in the steps."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * n_steps + at_200 - 200.0 * slope


def stretch_terminal(sigmas: Tensor, terminal: float) -> Tensor:
    """Rescale 1 - sigma so that the last sigma (before the final 0) equals ``terminal``: Qwen-Image, LTX."""
    if float(sigmas[-1]) == 1:
        raise UserError("a terminal stretch needs at least 2 sampling steps: with one the last sigma is pure noise")
    return 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])


def static_grid(n_steps: int, shift: float = 1.0) -> Tensor:
    """The linear grid with a static shift, as DanceGRPO and MixGRPO sample FLUX."""
    return static_shift(linear_grid(n_steps), shift)


def dynamic_grid(
    n_steps: int, tokens: int, *, shift_terminal: float | None = None, mu: float | None = None, **mu_options: float
) -> Tensor:
    """The linear grid with FLUX's exponential shift for this many tokens (or a given mu), then a terminal stretch."""
    value = linear_mu(tokens, **mu_options) if mu is None else mu  # type: ignore[arg-type]
    # In float32, by the scheduler's own formula: grids equal diffusers' bit for bit, and so do images.
    sigmas = exponential_shift(linear_grid(n_steps)[:-1], value)
    if shift_terminal is not None:
        sigmas = stretch_terminal(sigmas, shift_terminal)
    return append_zero(sigmas)


def scheduler_grid(n_steps: int, shift: float, n_train: int = 1000) -> Tensor:
    """diffusers' own flow-match grid for SD3.5: linspace between the shifted extremes, then shifted once more."""
    _check_steps(n_steps)
    low = static_shift(torch.tensor(1.0 / n_train, dtype=torch.float64), shift)
    return append_zero(static_shift(torch.linspace(1.0, float(low), n_steps, dtype=torch.float64), shift).float())


def karras_sigmas(n_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Karras et al. (arXiv 2206.00364) eq. 5, then 0. In sigma; ``EDM.time`` maps it to canonical time."""
    _check_steps(n_steps)
    ramp = torch.linspace(0, 1, n_steps, dtype=torch.float64)
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return append_zero(((high + ramp * (low - high)) ** rho).float())


# ---- time laws ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeLaw:
    """A density over t in (0, 1), given by its inverse CDF, so that stratifying u stratifies t exactly."""

    icdf: Callable[[Tensor], Tensor]


def uniform_law(low: float = 0.0, high: float = 1.0) -> TimeLaw:
    return TimeLaw(lambda u: low + (high - low) * u)


def logit_normal_law(mean: float = 0.0, std: float = 1.0) -> TimeLaw:
    """t = sigmoid(mean + std z): SD3's training law (arXiv 2403.03206)."""
    return TimeLaw(lambda u: torch.sigmoid(mean + std * math.sqrt(2) * torch.erfinv(2 * u.double() - 1)).to(u.dtype))


def shifted_law(law: TimeLaw, shift: float) -> TimeLaw:
    return TimeLaw(lambda u: static_shift(law.icdf(u), shift))


def stratified_uniform(n: int, generator: torch.Generator) -> Tensor:
    """n points in (0, 1), one in each of n equal strata, float32 [n]."""
    jitter = torch.rand(n, generator=generator)
    return ((torch.arange(n) + jitter) / n).clamp(1e-6, 1 - 1e-6)


def stratified_indices(n: int, n_steps: int, generator: torch.Generator) -> Tensor:
    """One grid index from each of n contiguous, nearly equal parts of range(n_steps) (vgrpo.md 2.5). int64 [n].

    The terminal sigma 0 is not among them: there the surrogate is 0/0.
    """
    if not 1 <= n <= n_steps:
        raise UserError(
            f"{n} pairs cannot be stratified over {n_steps} grid steps; use n_pairs <= {n_steps} or more sampling steps"
        )
    parts = torch.arange(n_steps).tensor_split(n)
    return torch.stack([part[torch.randint(len(part), (1,), generator=generator)[0]] for part in parts])
