"""The ordinary denoising loss, written over the core: what gives a toy's network its weights in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from core.adapter import Adapter
from core.rng import generator
from core.surrogate import Elbo, Experience
from core.types import Request, State

Data = Callable[[State, Sequence[Request], torch.Generator], State]


def clean_latents(adapter: Adapter, requests: Sequence[Request], data: Data, seed: int) -> State:
    """One clean state of these requests. ``data`` fills the acted sites of the state it is given."""
    return data(_empty(adapter, requests), requests, generator(seed, "data"))


def _empty(adapter: Adapter, requests: Sequence[Request]) -> State:
    cond = adapter.encode(requests)
    return adapter.prior(adapter.draw(cond, [generator(0, "shape", i) for i in range(len(requests))]), cond)


def pretrain(
    adapter: Adapter,
    requests: Sequence[Request],
    data: Data,
    *,
    steps: int = 400,
    learning_rate: float = 4e-3,
    seed: int = 0,
) -> float:
    """Fit ``adapter.modules()`` to ``data``; each step uses a fresh draw for all requests. -> the last 50 steps' loss.

    The weights are those of this seed whatever was random before.
    """
    torch.manual_seed(seed)
    parameters = [p for module in adapter.modules().values() for p in module.parameters()]
    for module in adapter.modules().values():
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    elbo = Elbo(n_pairs=1, share="none", time_sampler="independent", space="velocity", normalize=False)
    empty, cond, rows = _empty(adapter, requests), adapter.encode(requests), torch.arange(len(requests))
    last = []
    for step in range(steps):
        clean = data(empty, requests, generator(seed, "data", step))
        exp = Experience(clean, cond, rows, torch.zeros_like(rows), adapter.grid(2, cond), step, {})
        t, noise = elbo.times(exp, seed)[0], elbo.noise(adapter, exp, 0, seed)
        noisy = adapter.perturb(clean, noise, t, cond)
        losses = elbo.losses(adapter, exp, noisy, noise, t, adapter.forward(noisy, t, cond))
        loss = torch.stack([x.mean() for x in losses.values()]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        last.append(float(loss.detach()))
    return sum(last[-50:]) / len(last[-50:])
