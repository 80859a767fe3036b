"""The gradient of one micro-batch, pair by pair: memory depends neither on the number of pairs nor on the group size.

The objective is a function of log-ratios lr_i = L_i - L_old_i with L_i = -(1/N) sum_j l_ij, so its gradient is
sum_i g_i grad L_i with g_i = d objective / d lr_i. Pass 1 (no gradient) finds lr_i and g_i; pass 2 backpropagates
g_i l_ij / N for one pair at a time. Exact. Fully on-policy lr_i = 0 and pass 1 is not needed; with one ratio per pair
it is not needed either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.adapter import Adapter
from core.algorithm import Algorithm
from core.objectives import ratio_metrics, slope
from core.snapshots import Snapshots
from core.surrogate import Experience
from core.types import Noise, Predictions, State


def _snapshot_outputs(
    adapter: Adapter, algorithm: Algorithm, snapshots: Snapshots, noisy: State, t: Tensor, exp: Experience
) -> dict[str, Predictions]:
    out = {}
    for name in sorted(algorithm.snapshots):
        with torch.no_grad(), snapshots.use(name):
            out[name] = adapter.forward(noisy, t, exp.cond)
    return out


def _penalty(
    adapter: Adapter,
    algorithm: Algorithm,
    exp: Experience,
    noisy: State,
    t: Tensor,
    out: Predictions,
    others: dict[str, Predictions],
    stats: dict[str, Tensor],
) -> Tensor:
    """Weighted regularisers summed over the micro-batch; each one's per-sample mean is added to ``stats``."""
    total = torch.zeros((), device=adapter.device)
    for r in algorithm.regularisers:
        if r.weight == 0:
            continue
        value = torch.zeros(len(exp), device=adapter.device)
        for spec in adapter.streams:
            if spec.trainable:
                f, other = noisy[spec.name], others[r.to][spec.name]
                d = spec.process.distance(out[spec.name], other, f.value, t, spec.prediction, r.space)
                value = value + spec.weight * spec.mean(d, f.acted)
        total = total + r.weight * value.sum()
        key = f"regulariser/{r.name}"
        stats[key] = stats.get(key, 0) + value.detach() / algorithm.elbo.n_pairs
    return total


def accumulate(
    adapter: Adapter, algorithm: Algorithm, exp: Experience, snapshots: Snapshots, seed: int, n_total: int
) -> dict[str, Tensor]:
    """Add the gradient of minus the mean objective over ``n_total`` samples for this micro-batch's share.

    n_total counts the samples of the whole optimizer step on all processes. Returns detached per-sample statistics, [B]
    each: "loss", and per stream "surrogate/<s>", "ratio/<s>", "approx_kl/<s>", "clipfrac/<s>".
    """
    elbo, objective = algorithm.elbo, algorithm.objective
    times = elbo.times(exp, seed).to(adapter.device)
    streams = [s for s in adapter.streams if s.trainable and s.name in exp.advantage]
    advantage = {s.name: exp.advantage[s.name].to(adapter.device) for s in streams}
    per_pair = elbo.ratio == "pair"
    log_ratio = {s.name: torch.zeros(len(exp), device=adapter.device) for s in streams}
    if exp.old is not None and not per_pair:
        now = elbo.evaluate(adapter, exp, seed)
        log_ratio = {s.name: now[s.name].mean(0) - exp.old[s.name].mean(0) for s in streams}
    slopes = {s.name: slope(objective, log_ratio[s.name], advantage[s.name]) for s in streams}

    stats: dict[str, Tensor] = {}

    def add(key: str, value: Tensor, share: float = 1.0) -> None:
        stats[key] = stats.get(key, 0) + share * value.detach()

    for j, t in enumerate(times):
        noise: Noise = elbo.noise(adapter, exp, j, seed)
        noisy = adapter.perturb(exp.clean, noise, t, exp.cond)
        others = _snapshot_outputs(adapter, algorithm, snapshots, noisy, t, exp)
        out = adapter.forward(noisy, t, exp.cond)
        losses = elbo.losses(adapter, exp, noisy, noise, t, out)
        total = _penalty(adapter, algorithm, exp, noisy, t, out, others, stats)
        for spec in streams:
            surrogate = -losses[spec.name]
            add(f"surrogate/{spec.name}", surrogate, 1 / elbo.n_pairs)
            if per_pair:
                old = surrogate.detach() if exp.old is None else exp.old[spec.name][j]
                lr = surrogate - old
                value = objective(lr, advantage[spec.name])
                for key, x in ratio_metrics(lr.detach(), advantage[spec.name], algorithm.clip).items():
                    add(f"{key}/{spec.name}", x, 1 / elbo.n_pairs)
                add("loss", -spec.weight * value, 1 / elbo.n_pairs)
            else:
                value = slopes[spec.name] * surrogate
            total = total - spec.weight * value.sum()
        if total.requires_grad:
            (total / (elbo.n_pairs * n_total)).backward()
    if not per_pair:
        for spec in streams:
            lr, a = log_ratio[spec.name], advantage[spec.name]
            for key, x in ratio_metrics(lr, a, algorithm.clip).items():
                add(f"{key}/{spec.name}", x)
            add("loss", -spec.weight * objective(lr, a))
    return stats
