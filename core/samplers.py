"""Samplers: functions over grids, in the manner of k-diffusion. A sampler takes a grid and never builds one.

Every sampler is ``sampler(predict, state, noise, grid, streams) -> state``: ``predict(state, t)`` gives each stream's
network output, ``noise`` is the base randomness the state began from (categories read their reveal order from it),
``grid`` is [n + 1] or [n + 1, B]. Higher-order solvers act on streams that have an ODE; the others take first-order
steps in the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from core.adapter import hold
from core.errors import UserError
from core.kernels import Kernel
from core.processes import Gaussian, expand
from core.streams import StreamSpec
from core.types import Noise, Predict, Predictions, State


class Sampler(Protocol):
    def __call__(
        self, predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]
    ) -> State: ...


def _times(grid: Tensor, state: State) -> Tensor:
    """The grid as [n + 1, B] on the state's device."""
    value = next(iter(state.values())).value
    grid = grid.to(value.device)
    return grid.unsqueeze(1).expand(-1, len(value)) if grid.ndim == 1 else grid


def _set(state: State, spec: StreamSpec, value: Tensor) -> None:
    current = state[spec.name]
    state[spec.name] = current.with_value(hold(current.acted, value, current.value))


def _first_order(spec: StreamSpec, state: State, out: Predictions, noise: Noise, t: Tensor, t_next: Tensor) -> Tensor:
    f = state[spec.name]
    return spec.process.step(f.value, out[spec.name], t, t_next, spec.prediction, noise[spec.name])


@torch.no_grad()
def euler(predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]) -> State:
    """First order: Euler for flows, DDIM for diffusion, revealing for categories."""
    times, state = _times(grid, state), dict(state)
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        out = predict(state, t)
        for spec in streams:
            _set(state, spec, _first_order(spec, state, out, noise, t, t_next))
    return state


@torch.no_grad()
def heun(predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]) -> State:
    """Second order, two calls a step, the last step plain Euler (Karras et al., arXiv 2206.00364, algorithm 1)."""
    times, state = _times(grid, state), dict(state)
    for k, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
        out = predict(state, t)
        before = dict(state)
        for spec in streams:
            _set(state, spec, _first_order(spec, state, out, noise, t, t_next))
        if k == len(times) - 2:
            break
        second = predict(state, t_next)
        for spec in streams:
            if not spec.process.continuous:
                continue
            f, ahead = before[spec.name], state[spec.name]
            d1 = spec.process.derivative(f.value, out[spec.name], t, spec.prediction)
            d2 = spec.process.derivative(ahead.value, second[spec.name], t_next, spec.prediction)
            width = expand(spec.process.clock(t_next) - spec.process.clock(t), f.value)
            _set(state, spec, spec.process.move(f.value, width * (d1 + d2) / 2))
    return state


def _log_snr(process: Gaussian, t: Tensor) -> Tensor:
    # Finite at both ends: at t = 1 of a flow a = 0, and infinities would meet as inf - inf.
    return process.log_snr_half(t).clamp(-30.0, 30.0)


@torch.no_grad()
def dpmpp_2m(predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]) -> State:
    """DPM-Solver++ 2M, midpoint (arXiv 2211.01095, algorithm 2). First and last step are first order."""
    times, state = _times(grid, state), dict(state)
    history: dict[str, tuple[Tensor, Tensor]] = {}  # stream -> previous x0 estimate and its log-SNR
    last = len(times) - 2
    for k, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
        out = predict(state, t)
        for spec in streams:
            f, process = state[spec.name], spec.process
            value = _first_order(spec, state, out, noise, t, t_next)
            if isinstance(process, Gaussian):
                x0, snr = process.denoise(f.value, out[spec.name], t, spec.prediction), _log_snr(process, t)
                if spec.name in history and k != last:
                    x0_before, snr_before = history[spec.name]
                    c, c_next = process.coefficients(t), process.coefficients(t_next)
                    ratio = (_log_snr(process, t_next) - snr) / (snr - snr_before)
                    weight = 0.5 * (c_next.a - c.a * c_next.s / c.s) * ratio
                    value = value + expand(weight, value) * (x0 - x0_before)
                history[spec.name] = (x0, snr)
            _set(state, spec, value)
    return state


@dataclass
class _UniPC:
    """What UniPC remembers of one stream: the last two x0 estimates with their log-SNR, and the last step."""

    x0: list[Tensor] = field(default_factory=list)
    snr: list[Tensor] = field(default_factory=list)
    start: Tensor | None = None
    t: Tensor | None = None
    order: int = 1


def _unipc_coefficients(order: int, ratio: Tensor | None, h: Tensor) -> tuple[Tensor | None, Tensor]:
    """Corrector weights (for the older difference, for the new one); B(h) = e^h - 1 in data prediction (bh2)."""
    if order == 1 or ratio is None:
        return None, torch.full_like(h, 0.5)
    hh = -h
    phi1 = torch.expm1(hh)
    phi2 = phi1 / hh - 1
    b1, b2 = phi2 / phi1, 2 * (phi2 / hh - 0.5) / phi1
    # Rows of the 2 x 2 system: rho_0 + rho_1 = b1, r rho_0 + rho_1 = b2.
    older = (b2 - b1) / (ratio - 1)
    return older, b1 - older


@torch.no_grad()
def unipc(predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]) -> State:
    """UniPC order 2, bh2, data prediction (arXiv 2302.04867): every call first corrects the step that led to it."""
    times, state = _times(grid, state), dict(state)
    memory = {spec.name: _UniPC() for spec in streams if isinstance(spec.process, Gaussian)}
    n = len(times) - 1
    for k, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
        out = predict(state, t)
        for spec in streams:
            process = spec.process
            if not isinstance(process, Gaussian):
                _set(state, spec, _first_order(spec, state, out, noise, t, t_next))
                continue
            m, f = memory[spec.name], state[spec.name]
            x0, snr = process.denoise(f.value, out[spec.name], t, spec.prediction), _log_snr(process, t)
            value = f.value
            if m.start is not None and m.t is not None:
                h = snr - m.snr[-1]
                ratio = (m.snr[-2] - m.snr[-1]) / h if m.order == 2 else None
                older, newer = _unipc_coefficients(m.order, ratio, h)
                c, c_next = process.coefficients(m.t), process.coefficients(t)
                scale = c_next.a - c.a * c_next.s / c.s  # = -alpha (e^-h - 1), finite at pure noise
                base = expand(c_next.s / c.s, value) * m.start + expand(scale, value) * m.x0[-1]
                change = expand(newer, value) * (x0 - m.x0[-1])
                if older is not None and ratio is not None:
                    change = change + expand(older / ratio, value) * (m.x0[-2] - m.x0[-1])
                value = base + expand(scale, value) * change
            m.x0, m.snr = [*m.x0[-1:], x0], [*m.snr[-1:], snr]
            m.order = min(2, len(m.x0), n - k)
            m.start, m.t = value, t
            c, c_next = process.coefficients(t), process.coefficients(t_next)
            scale = c_next.a - c.a * c_next.s / c.s
            ahead = expand(c_next.s / c.s, value) * value + expand(scale, value) * x0
            if m.order == 2:
                ratio = (m.snr[-2] - snr) / (_log_snr(process, t_next) - snr)
                ahead = ahead + expand(0.5 * scale / ratio, value) * (m.x0[-2] - x0)
            _set(state, spec, ahead)
    return state


@dataclass(frozen=True)
class Step:
    """One recorded stochastic step: times [B], the state before, the value after and its score per stream [B]."""

    t: Tensor
    t_next: Tensor
    before: State
    after: State
    log_prob: dict[str, Tensor]


def stochastic(
    kernel: Kernel,
    step_noise: Callable[[int], Noise],
    *,
    noisy_steps: Sequence[int] | None = None,
    record: Callable[[Step], None] | None = None,
) -> Sampler:
    """A sampler whose steps are drawn from a kernel. step_noise(k) gives step k's fresh noise.

    noisy_steps: which steps draw (the others are deterministic); None = all but the last, whose next time is 0.
    record: called with every stochastic step.
    """

    @torch.no_grad()
    def sample(predict: Predict, state: State, noise: Noise, grid: Tensor, streams: Sequence[StreamSpec]) -> State:
        times, state = _times(grid, state), dict(state)
        chosen = set(range(len(times) - 2) if noisy_steps is None else noisy_steps)
        if kernel.deterministic and record is None:
            chosen = set()  # the same operations as euler, so that zero noise is the ODE bit for bit
        for k, (t, t_next) in enumerate(zip(times[:-1], times[1:], strict=True)):
            out, before, log_prob = predict(state, t), dict(state), {}
            fresh = step_noise(k) if k in chosen else {}
            for spec in streams:
                process, f = spec.process, before[spec.name]
                if k not in chosen or not isinstance(process, Gaussian):
                    _set(state, spec, _first_order(spec, before, out, noise, t, t_next))
                    continue
                x0, eps = process.split(f.value, out[spec.name], t, spec.prediction)
                mean, std = kernel.mean_std(process, x0, eps, t, t_next, t_max=times[1])
                value = mean + expand(std, mean) * fresh[spec.name]
                _set(state, spec, value)
                if record is not None:
                    log_prob[spec.name] = spec.mean(kernel.log_prob(state[spec.name].value, mean, std), f.acted)
            if record is not None and log_prob:
                record(Step(t, t_next, before, dict(state), log_prob))
        return state

    return sample


SAMPLERS: dict[str, Sampler] = {"euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m, "unipc": unipc}


def sampler_by_name(name: str) -> Sampler:
    if name not in SAMPLERS:
        raise UserError(f"sampler '{name}' is unknown; choose one of {', '.join(SAMPLERS)}")
    return SAMPLERS[name]
