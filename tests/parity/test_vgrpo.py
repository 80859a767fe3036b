"""The V-GRPO objective and its gradient, through the code that trains: ``core.update.accumulate``.

The "network" is a table of velocities [sample, pair, ...], so that its gradient is d loss / d velocity. The stored
times become the rollout grid with as many pairs as steps: stratification then takes every one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from core.adapter import Adapter, Layout
from core.advantages import Advantage
from core.algorithm import Algorithm, Regulariser
from core.processes import RectifiedFlow
from core.schedules import explicit_grid
from core.snapshots import Snapshots
from core.streams import StreamSpec
from core.surrogate import Elbo, Experience
from core.types import Conditioning, Field, Noise, Predictions, Request, Sample, State
from core.update import accumulate
from tests.parity.cases import Entry, by_id, entries


class Table(Adapter):
    """velocity[i, j] is what the network says of sample i at the j-th of ``times``; draws give ``eps`` in turn."""

    def __init__(self, velocity: Tensor, times: Tensor, eps: Tensor) -> None:
        self.streams = (StreamSpec("x", RectifiedFlow(), "velocity", ("site",), tuple("abcd"[: eps.ndim - 2])),)
        self.net = nn.ParameterDict({"table": nn.Parameter(velocity.clone())})
        self.times, self.eps, self.turn = times, eps, itertools.cycle(range(len(eps)))

    def encode(self, requests: Sequence[Request]) -> Conditioning:
        return Conditioning({"row": torch.arange(len(requests))}, ({},) * len(requests))

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        return {"x": Layout([(self.eps.shape[1],)] * len(cond), tuple(self.eps.shape[2:]))}

    def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
        assert len(generators) == 1, "the whole group shares one draw"
        return {"x": self.eps[next(self.turn)][None]}

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        pair = (self.times - t[0]).abs().argmin()
        assert (t == self.times[pair]).all(), "not a stored time"
        return {"x": self.net["table"][cond.tensors["row"], pair]}

    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        return [Sample({}) for _ in range(len(cond))]

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}


class Run:
    """One entry, on all of its pairs or on one of them, with theta moved from theta_old to theta."""

    def __init__(self, entry: Entry, ratio: str, pairs: Tensor, *, store_old: bool = True) -> None:
        p, clean = entry.params, entry["o"]
        n_event, everyone = clean.ndim - 2, torch.zeros(len(clean), dtype=torch.int64)
        self.pairs = pairs[entry["t"][pairs].argsort(descending=True)]  # a grid falls
        times = entry["t"][self.pairs]
        self.adapter = Table(entry["velocity_old"][:, self.pairs], times, entry["eps"][self.pairs])
        self.table = self.adapter.net["table"]
        self.soft = Advantage(clamp=None, soft_clip=p["soft_clip_eta"]).limit(entry["advantage"])
        penalty = (Regulariser("old", p["beta"], "x0"),) if p["beta"] else ()
        elbo = Elbo(n_pairs=len(times), ratio=ratio)
        self.algorithm = Algorithm(elbo, clip=p["clip"], regularisers=penalty, updates=2 if store_old else 1)
        self.exp = Experience(
            {"x": Field.dense(clean, n_event)},
            self.adapter.encode([Request()] * len(clean)),
            everyone, torch.arange(len(clean)), explicit_grid(times.tolist()), 0, {"x": self.soft},
        )  # fmt: skip
        self.snapshots = Snapshots({"net.table": self.table})
        self.snapshots.take("old")
        self.old = self.surrogate()
        if store_old:
            self.exp = replace(self.exp, old=self.algorithm.elbo.evaluate(self.adapter, self.exp, 0))
        with torch.no_grad():
            self.table.copy_(entry["velocity"][:, self.pairs])

    def surrogate(self, **options: object) -> Tensor:
        """l [G, N], in the order of the entry's pairs."""
        elbo = replace(self.algorithm.elbo, **options)
        return self.stored(-elbo.evaluate(self.adapter, self.exp, 0)["x"].T)

    def stored(self, x: Tensor) -> Tensor:
        """[G, pair, ...] from the grid's order to the entry's."""
        return x[:, self.pairs.argsort()]

    def accumulate(self) -> dict[str, Tensor]:
        return accumulate(self.adapter, self.algorithm, self.exp, self.snapshots, 0, n_total=len(self.exp))

    def check_losses(self, entry: Entry, stats: dict[str, Tensor], *, suffix: str, index: int | None) -> None:
        policy = stats["loss"].mean()
        kl = stats["regulariser/old_x0"].mean() if entry.params["beta"] else None
        loss = policy if kl is None else policy + entry.params["beta"] * kl

        def check(name: str, value: Tensor) -> None:
            if index is None:
                entry.check(name, value)
            else:
                full = entry[name].clone().double()
                full[index] = value
                entry.check(name, full)

        check(f"policy_loss{suffix}", policy)
        check(f"loss{suffix}", loss)
        if kl is not None:
            check(f"kl{suffix}", kl)


def all_pairs(entry: Entry) -> Tensor:
    return torch.arange(len(entry["t"]))


@pytest.mark.parametrize("entry", entries("vgrpo_mean_inside"), ids=by_id)
def test_mean_inside(entry: Entry) -> None:
    run = Run(entry, "mean", all_pairs(entry))
    entry.check("surrogate_old", run.old)
    entry.check("surrogate", run.surrogate())
    entry.check("weight", run.surrogate(normalize=False) / run.surrogate())
    entry.check("adv_soft", run.soft)
    stats = run.accumulate()
    entry.check("ratio", stats["ratio/x"])
    run.check_losses(entry, stats, suffix="", index=None)
    entry.check("grad_velocity", run.stored(run.table.grad))


@pytest.mark.parametrize("entry", entries("vgrpo_vrl_per_pair"), ids=by_id)
def test_per_pair(entry: Entry) -> None:
    run = Run(entry, "pair", all_pairs(entry))
    entry.check("surrogate", run.surrogate())
    entry.check("adv_soft", run.soft)
    run.accumulate()
    entry.check("grad_velocity", run.stored(run.table.grad))
    for j in range(len(entry["t"])):
        one = Run(entry, "pair", torch.tensor([j]))
        one.check_losses(entry, one.accumulate(), suffix="_pair", index=j)


@pytest.mark.parametrize("ratio", ["mean", "pair"])
@pytest.mark.parametrize("entry", entries("vgrpo_mean_inside", on_policy=1), ids=by_id)
def test_on_policy_without_old(entry: Entry, ratio: str) -> None:
    """With one update no old surrogate is stored; values and gradient are the same, for either ratio."""
    run = Run(entry, ratio, all_pairs(entry), store_old=False)
    stats = run.accumulate()
    assert torch.equal(stats["ratio/x"], torch.ones(len(run.exp)))
    entry.check("loss", stats["loss"].mean())
    entry.check("grad_velocity", run.stored(run.table.grad))
    assert run.adapter.counter.evaluations == (1 + 1) * len(entry["t"]) * len(run.exp)  # self.old, then accumulate


@pytest.mark.parametrize("entry", entries("vgrpo_mean_inside", on_policy=0), ids=by_id)
def test_micro_batches_add_up(entry: Entry) -> None:
    run = Run(entry, "mean", all_pairs(entry))
    for part in run.exp.micro_batches(1):
        accumulate(run.adapter, run.algorithm, part, run.snapshots, 0, n_total=len(run.exp))
    entry.check("grad_velocity", run.stored(run.table.grad))
