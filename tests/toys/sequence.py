"""Infilling of sequences of unequal length after a given prefix, by a model whose own time has data at 1.

The network is fed 1 - t and outputs x0 - eps, as F5-TTS and Z-Image do: prediction "velocity_reversed".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from core.adapter import Adapter, Layout, hold
from core.processes import RectifiedFlow
from core.rewards import RewardResult, ScoreSpec
from core.streams import StreamSpec
from core.types import Conditioning, Predictions, Request, Sample, State


class Network(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.outer = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, own_time: Tensor, acted: Tensor, valid: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).expand(len(x), -1) / 8
        features = torch.stack([x[..., 0], acted.float(), place, own_time[:, None].expand_as(acted)], dim=-1)
        h = self.inner(features)
        masks = [m[..., None] for m in (valid & acted, valid & ~acted)]
        pools = [((h * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)).expand_as(h) for m in masks]
        return self.outer(torch.cat([h, *pools], dim=-1))


class SequenceAdapter(Adapter):
    """inputs: prefix, a list of numbers. geometry: length, the whole sequence's."""

    streams = (StreamSpec("level", RectifiedFlow(), "velocity_reversed", ("place",), ("channel",)),)

    def __init__(self) -> None:
        self.network = Network()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"network": self.network}

    def encode(self, requests: Sequence[Request]) -> Conditioning:
        prefix = [torch.tensor(r.inputs["prefix"], dtype=torch.float32) for r in requests]
        padded = nn.utils.rnn.pad_sequence(prefix, batch_first=True)
        tensors = {"prefix": padded, "n_given": torch.tensor([len(p) for p in prefix])}
        return Conditioning(tensors, tuple(dict(r.geometry) for r in requests))

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        lengths, prefix = [g["length"] for g in cond.geometry], cond.tensors["prefix"]
        given = nn.functional.pad(prefix, (0, max(lengths) - prefix.shape[1]))[..., None]
        acted = torch.arange(max(lengths)) >= cond.tensors["n_given"].cpu()[:, None]
        return {"level": Layout([(n,) for n in lengths], (1,), acted=acted, given=given)}

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        f = noisy["level"]
        return {"level": self.network(f.value, 1 - t, f.acted, f.valid)}

    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        f = clean["level"]
        values = [x[m, 0].float().cpu() for x, m in zip(f.value, f.valid, strict=True)]
        return [Sample({"level": x}) if bool(torch.isfinite(x).all()) else Sample({}, ok=False) for x in values]


class Side:
    """Minus the distance of the infilled part's mean from 1.5 or -1.5, whichever side the prefix starts on."""

    scores = (ScoreSpec("side", -10.0, 0.0),)
    scope = "sample"
    needs = frozenset({"level"})

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        score = torch.full((len(samples),), float("nan"))
        for i, (s, r) in enumerate(zip(samples, requests, strict=True)):
            prefix = r.inputs["prefix"]
            if s.ok:
                score[i] = -(s.parts["level"][len(prefix) :].mean() - (1.5 if prefix[0] > 0 else -1.5)).abs()
        return RewardResult({"side": score}, {"side": score.isfinite()})


def make_requests(n: int, seed: int) -> list[Request]:
    g = torch.Generator().manual_seed(seed)
    levels, lengths = torch.randn(n, 2, generator=g), torch.randint(5, 10, (n,), generator=g)
    rows = zip((levels[:, :1] + 0.2 * levels).tolist(), lengths.tolist(), strict=True)
    return [Request({"prefix": prefix}, {"length": length}) for prefix, length in rows]


def data(state: State, requests: Sequence[Request], generator: torch.Generator) -> State:
    """What the model is pre-trained on, in the shape of ``state``: levels scattered around half the prefix's."""
    f = state["level"]
    given = (f.valid & ~f.acted)[..., None]
    centre = (f.value * given).sum(1, keepdim=True) / given.sum(1, keepdim=True) / 2
    drawn = centre + 0.35 * torch.randn(len(f.value), 1, 1, generator=generator)
    drawn = drawn + 0.2 * torch.randn(f.value.shape, generator=generator)
    return {"level": f.with_value(hold(f.acted, drawn, f.value))}
