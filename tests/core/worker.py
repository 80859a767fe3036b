"""One training process of a toy, for tests that need real processes: ``python -m tests.core.worker <json>``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from core.algorithm import Algorithm, Regulariser
from core.config import TrainerConfig
from core.parameters import make_trainable
from core.rewards import RewardSet
from core.rollout import RolloutConfig
from core.trainer import Hooks, Trainer
from tests.toys.sequence import SequenceAdapter, Side, make_requests

ALGORITHMS = {
    "on_policy": Algorithm(),
    "multi_step": Algorithm(
        clip=0.05, updates=2, regularisers=(Regulariser("old", 0.3), Regulariser("ref", 0.1)), ema_decay=0.9
    ),
}


def main(folder: str, algorithm: str, resume: bool = False, **settings: object) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    adapter = SequenceAdapter()
    parameters = make_trainable(adapter.modules(), "full")
    config = TrainerConfig(rollout=RolloutConfig(n_steps=4, batch=4), learning_rate=1e-3, **settings)  # type: ignore[arg-type]
    hooks = Hooks(iteration=lambda number, metrics, timings: print(f"iteration {number}", flush=True))
    trainer = Trainer(
        adapter, RewardSet([Side()]), make_requests(7, 0), make_requests(5, 1), ALGORITHMS[algorithm],
        parameters, config, Path(folder), Accelerator(cpu=True), hooks=hooks,
    )  # fmt: skip
    trainer.fit(resume=resume)
    if trainer.accelerator.is_main_process:
        save_file({k: p.detach() for k, p in parameters.items()}, Path(folder) / "final.safetensors")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
