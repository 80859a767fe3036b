"""Three modalities the core has never heard of: each passes the conformance suite and is improved by the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from core.adapter import Adapter
from core.algorithm import Algorithm
from core.config import TrainerConfig
from core.parameters import make_trainable
from core.rewards import Reward, RewardSet
from core.rollout import RolloutConfig
from core.testing import check_adapter
from core.trainer import Hooks, Trainer
from core.types import Request
from tests.toys import molecule, sequence, torus
from tests.toys.pretrain import Data, clean_latents, pretrain

MARGIN = 0.5  # of the held-out score's standard deviation over samples before training


@dataclass(frozen=True)
class Toy:
    adapter: Callable[[], Adapter]
    reward: Reward
    requests: Callable[[int, int], list[Request]]
    data: Data
    learning_rate: float = 1.5e-3


TOYS = {
    "sequence": Toy(sequence.SequenceAdapter, sequence.Side(), sequence.make_requests, sequence.data, 3e-3),
    "molecule": Toy(molecule.MoleculeAdapter, molecule.Shape(), molecule.make_requests, molecule.data, 2e-3),
    "torus": Toy(torus.TorusAdapter, torus.Turn(), torus.make_requests, torus.data),
}


@pytest.fixture(scope="module", params=list(TOYS))
def toy_and_adapter(request: pytest.FixtureRequest) -> tuple[Toy, Adapter]:
    torch.set_num_threads(1)
    toy = TOYS[request.param]
    adapter = toy.adapter()
    pretrain(adapter, toy.requests(48, 0), toy.data, steps=250)
    return toy, adapter


def rises(toy: Toy, adapter: Adapter, folder: Path, **options: object) -> dict[str, float]:
    """Train a copy; -> by score, the rise of the held-out mean in its standard deviations before training."""
    adapter = copy.deepcopy(adapter)
    scores: list[dict[str, torch.Tensor]] = []
    config = TrainerConfig(
        iterations=25,
        group_size=16,
        micro_batch=48,
        learning_rate=toy.learning_rate,
        warmup=5,
        rollout=RolloutConfig(n_steps=8, batch=48),
        eval_every=0,
        checkpoint_every=0,
        **options,  # type: ignore[arg-type]
    )
    Trainer(
        adapter,
        RewardSet([toy.reward]),
        toy.requests(32, 1),
        toy.requests(96, 2),
        Algorithm(),
        make_trainable(adapter.modules(), "full"),
        config,
        folder,
        hooks=Hooks(evaluation=lambda number, samples, requests, result: scores.append(result.scores)),
    ).fit()
    before, after = scores[0], scores[-1]
    return {k: float((after[k].mean() - before[k].mean()) / before[k].std()) for k in before}


def test_conformance(toy_and_adapter: tuple[Toy, Adapter]) -> None:
    toy, adapter = toy_and_adapter
    requests = toy.requests(4, 3)
    assert len({str(r.geometry) for r in requests}) > 1  # otherwise padding is not tested
    check_adapter(adapter, requests, data=clean_latents(adapter, requests, toy.data, 4))


def test_vgrpo_raises_every_held_out_score(toy_and_adapter: tuple[Toy, Adapter], tmp_path: Path) -> None:
    for name, rise in rises(*toy_and_adapter, tmp_path).items():
        assert rise > MARGIN, f"{name} rose by {rise:.2f} standard deviations"


def test_shuffled_advantages_raise_none(toy_and_adapter: tuple[Toy, Adapter], tmp_path: Path) -> None:
    for name, rise in rises(*toy_and_adapter, tmp_path, shuffle_advantages=True).items():
        assert rise < MARGIN, f"{name} rose by {rise:.2f} standard deviations without a signal"
