"""Advantages: pure functions that compose. Invalid scores are masked, never zero; flat groups are exact zeros.

Sources: V-GRPO (arXiv 2604.23380), Flow-GRPO (2505.05470: group mean, whole-batch std), DanceGRPO (2505.07818: group
std), MixGRPO (2507.21802: sum of per-reward advantages). See research notes vgrpo.md section 2.9.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from core.errors import UserError
from core.rewards import ScoreSpec


@dataclass(frozen=True)
class Groups:
    """index: int64 [N], the group of each sample. valid: bool [N]. raw: float [N], the scores before any transform."""

    index: Tensor
    valid: Tensor
    raw: Tensor

    def sum(self, x: Tensor) -> Tensor:
        """Sum of valid entries of each sample's group, back on the samples: [N] -> [N]."""
        size = int(self.index.max()) + 1
        return x.new_zeros(size).index_add(0, self.index, torch.where(self.valid, x, 0.0))[self.index]

    @property
    def count(self) -> Tensor:
        return self.sum(torch.ones_like(self.raw))

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count.clamp(min=1)

    def std(self, x: Tensor, ddof: int) -> Tensor:
        square = self.sum((x - self.mean(x)).square())
        return torch.sqrt(square / (self.count - ddof).clamp(min=1))

    def flat(self) -> Tensor:
        """bool [N]: the sample's group has no spread (or fewer than two valid scores), so it teaches nothing.

        Spread is judged relative to the scores' magnitude: a mean of equal float32 scores is not exactly those scores,
        and the residue divided by a tiny std would be an advantage of order one.
        """
        size = int(self.index.max()) + 1
        inf = torch.full((size,), float("inf"), dtype=self.raw.dtype)
        high = (-inf).scatter_reduce(0, self.index, torch.where(self.valid, self.raw, -torch.inf), "amax")
        low = inf.scatter_reduce(0, self.index, torch.where(self.valid, self.raw, torch.inf), "amin")
        spread = high - low
        scale = torch.maximum(high.abs(), low.abs())
        flat = ~(spread > 1e-6 * scale)
        return flat[self.index] | (self.count < 2)


Transform = Callable[[Tensor, Groups], Tensor]


def chain(*transforms: Transform) -> Transform:
    def apply(x: Tensor, groups: Groups) -> Tensor:
        for transform in transforms:
            x = transform(x, groups)
        return x

    return apply


def center() -> Transform:
    """Minus the group mean."""
    return lambda x, groups: x - groups.mean(x)


def scale_by_group_std(eps: float = 1e-8, ddof: int = 1) -> Transform:
    return lambda x, groups: x / (groups.std(groups.raw, ddof) + eps)


def scale_by_global_std(eps: float = 1e-4, ddof: int = 0) -> Transform:
    """Over the std of all valid raw scores of the batch, as Flow-GRPO's and DiffusionNFT's released code does."""

    def apply(x: Tensor, groups: Groups) -> Tensor:
        values = groups.raw[groups.valid]
        std = values.std(correction=ddof) if len(values) > ddof else values.new_zeros(())
        return x / (std + eps)

    return apply


def clamp(limit: float) -> Transform:
    return lambda x, groups: x.clamp(-limit, limit)


def soft_clip(eta: float) -> Transform:
    """eta tanh(A / eta): slope 1 at 0, bounded by eta (V-GRPO)."""
    return lambda x, groups: eta * torch.tanh(x / eta)


def apply(transform: Transform, scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """A transform over one score, float64 inside, float32 out [N]: zero where invalid and in flat groups."""
    groups = Groups(group, valid, torch.where(valid, scores, 0.0).double())
    out = transform(groups.raw, groups)
    return torch.where(valid & ~groups.flat(), out, 0.0).float()


@dataclass(frozen=True)
class Advantage:
    """Scores -> one advantage per sample and stream.

    weights: score name -> weight; scores not named are only measured; empty = all that teach, weight 1.
    scale: "group" std, "global" std of the batch, or "none". combine: "advantages" normalises each score and then adds
    (a score of small range is not drowned), "rewards" adds first. clamp, soft_clip: applied to the combination.
    """

    scale: Literal["group", "global", "none"] = "group"
    eps: float = 1e-8
    ddof: int = 1
    clamp: float | None = 5.0
    soft_clip: float | None = None
    combine: Literal["advantages", "rewards"] = "advantages"
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scale not in ("group", "global", "none"):
            raise UserError(f"advantage.scale '{self.scale}' is unknown; choose group, global or none")
        if self.combine not in ("advantages", "rewards"):
            raise UserError(f"advantage.combine '{self.combine}' is unknown; choose advantages or rewards")
        for name, value in (("clamp", self.clamp), ("soft_clip", self.soft_clip)):
            if value is not None and value <= 0:
                raise UserError(f"advantage.{name} is {value}; use a positive number, or null for none")

    @property
    def normalise(self) -> Transform:
        if self.scale == "none":
            return center()
        scale = scale_by_group_std if self.scale == "group" else scale_by_global_std
        return chain(center(), scale(self.eps, self.ddof))

    def limit(self, x: Tensor) -> Tensor:
        if self.clamp is not None:
            x = x.clamp(-self.clamp, self.clamp)
        return x if self.soft_clip is None else self.soft_clip * torch.tanh(x / self.soft_clip)

    def weight_of(self, specs: Sequence[ScoreSpec]) -> dict[str, float]:
        """Score name -> weight. Raises UserError for a weight whose score does not exist."""
        names = [spec.name for spec in specs]
        if not self.weights:
            return {spec.name: 1.0 for spec in specs if spec.teaches}
        for name in self.weights:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                raise UserError(
                    f"advantage.weights names the score '{name}'; the rewards give {names}"
                    + (f" (did you mean '{close[0]}'?)" if close else "")
                )
        return {name: float(w) for name, w in self.weights.items() if w != 0}

    def __call__(
        self,
        scores: Mapping[str, Tensor],
        valid: Mapping[str, Tensor],
        group: Tensor,
        specs: Sequence[ScoreSpec],
        streams: Sequence[str],
    ) -> dict[str, Tensor]:
        """scores, valid: name -> [N], of all processes; group: int64 [N]. -> stream -> float32 [N]."""
        weights = self.weight_of(specs)
        out: dict[str, Tensor] = {}
        for stream in streams:
            mine = [s.name for s in specs if s.name in weights and ("*" in s.streams or stream in s.streams)]
            if not mine:
                continue
            if self.combine == "rewards":
                total = torch.stack([weights[name] * scores[name] for name in mine]).sum(0)
                ok = torch.stack([valid[name] for name in mine]).all(0)
                value = apply(self.normalise, total, ok, group)
            else:
                parts = [weights[name] * apply(self.normalise, scores[name], valid[name], group) for name in mine]
                value = torch.stack(parts).sum(0)
            out[stream] = self.limit(value)
        if not out:
            raise UserError("no score teaches any stream; name one in advantage.weights with a weight other than 0")
        return out
