"""What the trainer is told, apart from the algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.errors import UserError
from core.rollout import RolloutConfig


@dataclass(frozen=True)
class TrainerConfig:
    """iterations: rollouts in all. prompts x group_size: samples a rollout. micro_batch: samples a backward pass holds.
    warmup: optimizer steps of linear warm-up. schedule: "constant", or "linear" to 0 after the last iteration.
    *_every: in iterations, 0 = only at the end. keep: checkpoints kept. shuffle_advantages: within groups, the control
    that must not learn. max_skipped: non-finite steps in a row."""

    iterations: int = 100
    prompts: int = 8
    group_size: int = 8
    micro_batch: int = 64
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    warmup: int = 0
    schedule: Literal["constant", "linear"] = "constant"
    seed: int = 0
    eval_every: int = 10
    eval_n_steps: int | None = None
    eval_with_ema: bool = False
    checkpoint_every: int = 10
    keep: int = 2
    shuffle_advantages: bool = False
    max_skipped: int = 10

    def __post_init__(self) -> None:
        for name in ("iterations", "micro_batch", "keep", "max_skipped"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} is {getattr(self, name)}; use 1 or more")
        if self.schedule not in ("constant", "linear"):
            raise UserError(f"train.schedule '{self.schedule}' is unknown; choose constant or linear")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise UserError(f"train.{name} is {getattr(self, name)}; use a positive number")
