"""An algorithm is a frozen composition of values; V-GRPO is the default one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from core.advantages import Advantage
from core.errors import UserError
from core.objectives import Objective, clipped
from core.streams import StreamSpec
from core.surrogate import SPACES, Elbo

SNAPSHOTS = ("old", "ref", "ema")


@dataclass(frozen=True)
class Regulariser:
    """weight * mean squared difference between the policy's and a snapshot's prediction, on the surrogate's pairs.

    to "old" in space "x0" is V-GRPO's KL (eq. 16); to "ref" in space "velocity" keeps the policy near its start.
    """

    to: Literal["old", "ref", "ema"]
    weight: float
    space: Literal["x0", "velocity", "eps"] = "x0"

    def __post_init__(self) -> None:
        if self.to not in SNAPSHOTS:
            raise UserError(f"regulariser to '{self.to}' is unknown; choose one of {', '.join(SNAPSHOTS)}")
        if self.space not in SPACES:
            raise UserError(f"regulariser space '{self.space}' is unknown; choose one of {', '.join(SPACES)}")
        if self.weight < 0:
            raise UserError(f"regulariser weight {self.weight} is negative; use 0 or more")

    @property
    def name(self) -> str:
        return f"{self.to}_{self.space}"


@dataclass(frozen=True)
class Algorithm:
    """elbo: the likelihood. clip: PPO range of the ratio, None = off. updates: optimizer steps a rollout's samples are
    split into; epochs: passes over them. ema_decay: of the snapshot "ema", None = no such snapshot.
    """

    elbo: Elbo = field(default_factory=Elbo)
    advantage: Advantage = field(default_factory=Advantage)
    clip: float | None = None
    regularisers: tuple[Regulariser, ...] = ()
    updates: int = 1
    epochs: int = 1
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise UserError(f"algorithm.clip is {self.clip}; use a positive range such as 1e-2, or null for none")
        for name in ("updates", "epochs"):
            if getattr(self, name) < 1:
                raise UserError(f"algorithm.{name} is {getattr(self, name)}; use 1 or more")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UserError(f"algorithm.ema_decay is {self.ema_decay}; use a number in [0, 1), or null for none")
        if self.ema_decay is None and any(r.to == "ema" for r in self.regularisers):
            raise UserError("a regulariser points to 'ema' but algorithm.ema_decay is null; set it, or use to=ref")
        if self.on_policy and any(r.to == "old" for r in self.regularisers):
            raise UserError(
                "a regulariser to 'old' is always zero with one update per rollout; use updates=2 or more, or to=ref"
            )
        if self.on_policy and self.clip is not None:
            raise UserError(
                "algorithm.clip never binds with one update per rollout (the ratio is 1); "
                "use updates=2 or more, or clip=null"
            )

    @property
    def on_policy(self) -> bool:
        """One optimizer step per rollout: the ratio is 1 and no old-policy forward is needed."""
        return self.updates * self.epochs == 1

    @property
    def objective(self) -> Objective:
        return partial(clipped, clip=self.clip)

    @property
    def snapshots(self) -> set[str]:
        """Which copies of the parameters this algorithm needs."""
        return {r.to for r in self.regularisers if r.weight > 0}

    def check(self, streams: Sequence[StreamSpec], n_steps: int, n_samples: int) -> None:
        """Refuse illegal combinations with these streams and this batch before any work."""
        self.elbo.check(streams, n_steps)
        if self.updates > n_samples:
            raise UserError(f"algorithm.updates {self.updates} exceeds the {n_samples} samples of a rollout; lower it")
        for spec in streams:
            for r in self.regularisers:
                if spec.trainable and r.space not in spec.process.spaces:
                    raise UserError(
                        f"regulariser space '{r.space}' is not defined for stream '{spec.name}'; "
                        f"choose one of {sorted(spec.process.spaces)}"
                    )
