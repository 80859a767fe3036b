"""What reaches the update from a rollout that was made in parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from core.advantages import Advantage
from core.algorithm import Algorithm
from core.collector import Collector
from core.data import GroupSampler
from core.rewards import RewardResult, RewardSet, ScoreSpec
from core.rollout import RolloutConfig
from core.schedules import dynamic_grid
from core.types import Conditioning, Predictions, Request, Sample, State
from core.update import accumulate
from tests.core.tiny import Tiny


class Sized(Tiny):
    """A dynamic shift: the grid depends on the number of tokens; one for all where they agree."""

    broken: float | None = None  # a first token at or above which the network says NaN

    def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
        grids = [dynamic_grid(n_steps, 1000 * geometry["n"]) for geometry in cond.geometry]
        return grids[0] if all(torch.equal(g, grids[0]) for g in grids) else torch.stack(grids, dim=1)

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        out = super().predict(noisy, t, cond, branch)
        if self.broken is not None:
            bad = noisy["x"].value[:, 0, 0] >= self.broken
            out = {"x": torch.where(bad[:, None, None], torch.nan, out["x"])}
        return out


class First:
    """Scores the first number of a sample."""

    scores = (ScoreSpec("first", -10, 10),)
    scope = "sample"
    needs = frozenset({"x"})

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        value = torch.stack([sample.parts["x"].flatten()[0] for sample in samples])
        return RewardResult({"first": value}, {"first": torch.ones(len(samples), dtype=torch.bool)})


def collector(adapter: Tiny, folder: Path, sizes: Sequence[int], batch: int) -> Collector:
    requests = [Request({"c": [0.1 * k, 1.0]}, {"n": n}) for k, n in enumerate(sizes)]
    out = Collector(
        adapter, RewardSet([First()]), requests, requests, GroupSampler(len(sizes), len(sizes), 4, 0),
        RolloutConfig(n_steps=5, batch=batch), Accelerator(cpu=True), folder, lambda *_: None,
    )  # fmt: skip
    out.prepare()
    return out


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("sizes", [(2, 4, 3), (3, 3, 3)], ids=["ragged", "equal"])
def test_each_sample_keeps_the_grid_it_was_made_with(tmp_path: Path, sizes: tuple[int, ...], batch: int) -> None:
    adapter = Sized("ragged")
    exp = collector(adapter, tmp_path, sizes, batch).collect(0, Advantage()).experience
    grid = exp.grid if exp.grid.ndim == 2 else exp.grid[:, None].expand(-1, len(exp))
    for row, geometry in enumerate(exp.cond.geometry):
        assert torch.equal(grid[:, row], dynamic_grid(5, 1000 * geometry["n"]))
    t = Algorithm().elbo.times(exp, 0)
    assert all(torch.isin(t[:, row], grid[:-1, row]).all() for row in range(len(exp)))


def test_the_parts_of_a_rollout_do_not_matter(tmp_path: Path) -> None:
    adapter = Sized("ragged")
    whole, parts = (
        collector(adapter, tmp_path, (2, 4, 3), batch).collect(0, Advantage()).experience for batch in (12, 5)
    )
    valid = whole.clean["x"].valid
    assert torch.equal(parts.clean["x"].valid, valid)
    torch.testing.assert_close(parts.clean["x"].value[valid], whole.clean["x"].value[valid])
    torch.testing.assert_close(parts.advantage["x"], whole.advantage["x"], rtol=1e-4, atol=1e-5)


def test_a_sample_that_is_not_finite_is_missing_and_harmless(tmp_path: Path) -> None:
    """Its score is missing, its advantage 0, and the gradient of the others is finite."""
    adapter = Sized("ragged")
    adapter.broken = 1.0
    collected = collector(adapter, tmp_path, (2, 4, 3), 5).collect(0, Advantage())
    exp, valid = collected.experience, collected.result.valid["first"]
    assert 0 < int(valid.sum()) < len(valid)
    assert torch.isfinite(exp.clean["x"].value).all()
    assert not exp.advantage["x"][~valid].any()
    assert exp.advantage["x"][valid].any()
    adapter.broken = None
    accumulate(adapter, Algorithm(), exp, adapter.snapshots("old"), 0, len(exp))
    assert torch.isfinite(adapter.gradient()).all()
