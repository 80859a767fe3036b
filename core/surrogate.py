"""The ELBO likelihood: minus a denoising loss of the finished sample stands for its log-likelihood.

V-GRPO (arXiv 2604.23380). For a clean sample o and pairs (t_j, noise_j), z = perturb(o, noise_j, t_j):

    l_j  = <(x0_hat(z) - o)^2> / sg<|x0_hat(z) - o|>        <.> = mean over acted degrees of freedom
    L    = -(1/N) sum_j l_j                                  the surrogate, larger = more likely
    rho  = exp(L_theta - L_old)

Every ablation of the paper is an option of :class:`Elbo`; the defaults are the paper's method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from core.adapter import Adapter
from core.errors import UserError
from core.rng import generator
from core.schedules import (
    TimeLaw,
    logit_normal_law,
    shifted_law,
    stratified_indices,
    stratified_uniform,
    uniform_law,
)
from core.streams import StreamSpec
from core.types import Conditioning, Noise, Predictions, State, index_state, pad_noise

SHARING = ("none", "t", "t_noise", "batch")
TIME_SAMPLERS = ("stratified_index", "index", "stratified", "independent")
SPACES = ("x0", "velocity", "eps")


@dataclass(frozen=True)
class Experience:
    """One process's share of an iteration: all that the V-GRPO update needs.

    clean: the finished samples [B]. cond: their conditioning. group, member: int64 [B], global group number of this
    iteration and place in it. grid: the rollout's grid, [n + 1] or [n + 1, B]. advantage: stream -> float32 [B].
    old: stream -> [n_pairs, B], the behaviour policy's surrogate on the same pairs, or None when fully on-policy.
    """

    clean: State
    cond: Conditioning
    group: Tensor
    member: Tensor
    grid: Tensor
    iteration: int
    advantage: dict[str, Tensor]
    old: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.group)

    def index(self, idx: Tensor) -> Experience:
        device = next(iter(self.clean.values())).value.device
        return replace(
            self,
            clean=index_state(self.clean, idx.to(device)),
            cond=self.cond.index(idx),
            group=self.group[idx],
            member=self.member[idx],
            grid=self.grid if self.grid.ndim == 1 else self.grid[:, idx],
            advantage={k: v[idx] for k, v in self.advantage.items()},
            old=None if self.old is None else {k: v[:, idx] for k, v in self.old.items()},
        )

    def micro_batches(self, size: int) -> list[Experience]:
        return [self.index(part) for part in torch.arange(len(self)).split(size) if len(part)]


@dataclass(frozen=True)
class Elbo:
    """Options of the surrogate.

    n_pairs: N_MC. share: what members of a group have in common: "none", "t", "t_noise" (V-GRPO), or "batch" (one set
    for every group). time_sampler: "stratified_index" (one rollout-grid index from each of n_pairs equal parts: the
    paper's), "index" (grid indices, independent), "stratified" / "independent" (t from ``law`` by inverse CDF).
    space: where residuals are compared. normalize: divide by the detached mean absolute residual, floored at ``floor``.
    ratio: "mean" (average over pairs, then exp: the paper) or "pair" (one ratio per pair).
    """

    n_pairs: int = 4
    share: Literal["none", "t", "t_noise", "batch"] = "t_noise"
    time_sampler: Literal["stratified_index", "index", "stratified", "independent"] = "stratified_index"
    space: Literal["x0", "velocity", "eps"] = "x0"
    normalize: bool = True
    floor: float = 1e-5
    ratio: Literal["mean", "pair"] = "mean"
    law: Literal["uniform", "logit_normal"] = "uniform"
    law_shift: float = 1.0

    def __post_init__(self) -> None:
        for name, options in (("share", SHARING), ("time_sampler", TIME_SAMPLERS), ("space", SPACES)):
            if getattr(self, name) not in options:
                raise UserError(
                    f"surrogate.{name} '{getattr(self, name)}' is unknown; choose one of {', '.join(options)}"
                )
        if self.ratio not in ("mean", "pair"):
            raise UserError(f"surrogate.ratio '{self.ratio}' is unknown; choose mean or pair")
        if self.law not in ("uniform", "logit_normal"):
            raise UserError(f"surrogate.law '{self.law}' is unknown; choose uniform or logit_normal")
        if self.n_pairs < 1:
            raise UserError(f"surrogate.n_pairs is {self.n_pairs}; use 1 or more (the paper uses 4)")

    def check(self, streams: Sequence[StreamSpec], n_steps: int) -> None:
        """Refuse what cannot work with these streams and this rollout, before any work."""
        for spec in streams:
            if spec.trainable and self.space not in spec.process.spaces:
                raise UserError(
                    f"surrogate.space '{self.space}' is not defined for stream '{spec.name}' "
                    f"({type(spec.process).__name__}); choose one of {sorted(spec.process.spaces)}"
                )
        if self.time_sampler == "stratified_index":
            stratified_indices(self.n_pairs, n_steps, torch.Generator())

    @property
    def time_law(self) -> TimeLaw:
        law = uniform_law() if self.law == "uniform" else logit_normal_law()
        return law if self.law_shift == 1 else shifted_law(law, self.law_shift)

    # ---- pairs ----

    def _keys(self, exp: Experience, shared: bool) -> list[tuple[int, ...]]:
        """Samples with equal keys see equal randomness."""
        if self.share == "batch":
            return [()] * len(exp)
        if shared:
            return [(g,) for g in exp.group.tolist()]
        return list(zip(exp.group.tolist(), exp.member.tolist(), strict=True))

    def times(self, exp: Experience, seed: int) -> Tensor:
        """t [n_pairs, B], float32; fresh every iteration, the same for every pass of one iteration."""
        n_steps = len(exp.grid) - 1
        drawn: dict[tuple[int, ...], Tensor] = {}
        keys = self._keys(exp, shared=self.share != "none")
        by_index = self.time_sampler in ("stratified_index", "index")
        for key in keys:
            if key in drawn:
                continue
            g = generator(seed, "surrogate_t", exp.iteration, *key)
            if self.time_sampler == "stratified_index":
                drawn[key] = stratified_indices(self.n_pairs, n_steps, g)
            elif self.time_sampler == "index":
                drawn[key] = torch.randint(n_steps, (self.n_pairs,), generator=g)
            elif self.time_sampler == "stratified":
                drawn[key] = self.time_law.icdf(stratified_uniform(self.n_pairs, g))
            else:
                drawn[key] = self.time_law.icdf(torch.rand(self.n_pairs, generator=g).clamp(1e-6, 1 - 1e-6))
        chosen = torch.stack([drawn[key] for key in keys], dim=1)
        if not by_index:
            return chosen.float()
        return exp.grid[chosen] if exp.grid.ndim == 1 else exp.grid.gather(0, chosen)

    def noise(self, adapter: Adapter, exp: Experience, pair: int, seed: int) -> Noise:
        """The base randomness of one pair for every sample, [B, ...]; drawn once per group and expanded.

        Raises UserError if members that must share noise differ in geometry.
        """
        keys = self._keys(exp, shared=self.share == "t_noise")
        rows: dict[tuple[int, ...], int] = {}
        first: list[int] = []
        for i, key in enumerate(keys):
            if key not in rows:
                rows[key] = len(first)
                first.append(i)
            elif exp.cond.geometry[i] != exp.cond.geometry[first[rows[key]]]:
                raise UserError(
                    f"samples that share surrogate noise differ in geometry ({dict(exp.cond.geometry[i])} and "
                    f"{dict(exp.cond.geometry[first[rows[key]]])}); "
                    "put the geometry in the request, or use surrogate.share=t"
                )
        generators = [generator(seed, "surrogate_noise", exp.iteration, *key, pair) for key in rows]
        unique = adapter.draw(exp.cond.index(torch.tensor(first)), generators)
        expand = torch.tensor([rows[key] for key in keys], device=adapter.device)
        return pad_noise({name: x[expand] for name, x in unique.items()}, exp.clean)

    # ---- the loss of one pair ----

    def losses(
        self, adapter: Adapter, exp: Experience, noisy: State, noise: Noise, t: Tensor, out: Predictions
    ) -> dict[str, Tensor]:
        """stream -> l [B], with gradient through ``out`` and a detached normaliser."""
        result = {}
        for spec in adapter.streams:
            if not spec.trainable:
                continue
            clean = exp.clean[spec.name]
            square, absolute = spec.process.errors(
                out[spec.name], clean.value, noise[spec.name], noisy[spec.name].value, t, spec.prediction, self.space
            )
            loss = spec.mean(square, clean.acted)
            if self.normalize and absolute is not None:
                loss = loss / spec.mean(absolute.detach(), clean.acted).clamp(min=self.floor)
            result[spec.name] = loss
        return result

    @torch.no_grad()
    def evaluate(self, adapter: Adapter, exp: Experience, seed: int) -> dict[str, Tensor]:
        """The surrogate itself, stream -> [n_pairs, B], without gradient."""
        times = self.times(exp, seed).to(adapter.device)
        rows: list[dict[str, Tensor]] = []
        for j, t in enumerate(times):
            noise = self.noise(adapter, exp, j, seed)
            noisy = adapter.perturb(exp.clean, noise, t, exp.cond)
            rows.append(self.losses(adapter, exp, noisy, noise, t, adapter.forward(noisy, t, exp.cond)))
        return {name: -torch.stack([row[name] for row in rows]) for name in rows[0]}


def variation(surrogate: Tensor, group: Tensor) -> dict[str, float]:
    """Coefficient of variation std / |mean| of per-sample surrogates [B]: overall, and the mean over groups.

    The paper reports 0.230 -> 0.128 overall and 0.170 -> 0.038 within groups on FLUX.1-dev (notes, vgrpo.md section 5).
    """
    x = surrogate.double()

    def cv(values: Tensor) -> Tensor:
        return values.std(correction=0) / values.mean().abs().clamp(min=1e-12)

    inside = [cv(x[group == g]) for g in group.unique() if int((group == g).sum()) > 1]
    return {
        "cv": float(cv(x)) if len(x) > 1 else 0.0,
        "cv_within": float(torch.stack(inside).mean()) if inside else 0.0,
    }
