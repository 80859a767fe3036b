"""The reward contract. A failed score is a missing score, never a number.

Raw scores stay float32: in bfloat16 neighbouring PickScores are 0.125 apart and ranking inside a group is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.errors import UserError
from core.types import Request, Sample

Scope = Literal["sample", "group", "batch"]


@dataclass(frozen=True)
class ScoreSpec:
    """One named score. low, high: documented range. streams: which streams this score teaches ("*" = all).

    teaches: False = only measured, unless ``Advantage.weights`` names it.
    """

    name: str
    low: float
    high: float
    streams: tuple[str, ...] = ("*",)
    teaches: bool = True


@dataclass
class RewardResult:
    """scores: name -> float32 [B]. valid: name -> bool [B]; False = no score. details: free-form, one per sample."""

    scores: dict[str, Tensor]
    valid: dict[str, Tensor]
    details: list[Mapping[str, Any]] = field(default_factory=list)


@runtime_checkable
class Reward(Protocol):
    """Scores decoded samples. scope says what must arrive together: one sample, a whole group, or the whole batch."""

    scores: tuple[ScoreSpec, ...]
    scope: Scope
    needs: frozenset[str]

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult: ...


def checked(reward: Reward, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
    """Call a reward and hold it to its contract: shapes, names, float32, and non-finite or failed = not valid.

    Raises UserError when the result does not have the declared scores or has the wrong length.
    """
    who = type(reward).__name__
    for sample in samples:
        missing = reward.needs - sample.parts.keys()
        if sample.ok and missing:
            raise UserError(
                f"reward {who} needs the part '{sorted(missing)[0]}', the adapter decodes {sorted(sample.parts)};"
                " choose a reward for this modality"
            )
    result = reward.score(samples=samples, requests=requests, group=group)
    names = {spec.name for spec in reward.scores}
    if set(result.scores) != names:
        raise UserError(f"reward {who} declares {sorted(names)} but returned {sorted(result.scores)}")
    ok = torch.tensor([sample.ok for sample in samples], dtype=torch.bool)
    scores, valid = {}, {}
    for name in sorted(names):
        value = torch.as_tensor(result.scores[name]).detach().float().cpu()
        mask = torch.as_tensor(result.valid[name]).detach().bool().cpu()
        if value.shape != (len(samples),) or mask.shape != (len(samples),):
            raise UserError(
                f"reward {who} returned '{name}' of shape {tuple(value.shape)} for {len(samples)} samples; "
                f"return one float per sample, shape [{len(samples)}]"
            )
        mask = mask & ok & torch.isfinite(value)
        # A missing score is stored as NaN so that nothing downstream can mistake it for a number.
        scores[name], valid[name] = torch.where(mask, value, torch.full_like(value, float("nan"))), mask
    return RewardResult(scores, valid, list(result.details))


class RewardSet:
    """Several rewards as one; score names must differ. The weight of a score lives in the advantage, not here."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        if not rewards:
            raise UserError("no reward given; name at least one, for example reward.names=[scene]")
        self.rewards = tuple(rewards)
        self.scores = tuple(spec for reward in rewards for spec in reward.scores)
        self.needs = frozenset(need for reward in rewards for need in reward.needs)
        order: tuple[Scope, ...] = ("sample", "group", "batch")
        self.scope: Scope = max((reward.scope for reward in rewards), key=order.index)
        names = [spec.name for spec in self.scores]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two rewards give a score named '{name}'; rename one")

    def check(self, requests: Sequence[Request]) -> None:
        """Let every reward that has a ``check`` refuse requests that it cannot score, before any work."""
        for reward in self.rewards:
            check = getattr(reward, "check", None)
            if check is not None:
                check(requests)

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        out = RewardResult({}, {})
        for reward in self.rewards:
            result = checked(reward, samples, requests, group)
            out.scores.update(result.scores)
            out.valid.update(result.valid)
        return out
