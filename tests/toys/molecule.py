"""Molecules: positions of zero centre of mass beside categorical types, each stream with its own reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from core.adapter import Adapter, Layout
from core.processes import MaskedCategorical, RectifiedFlow, expand
from core.rewards import RewardResult, ScoreSpec
from core.streams import StreamSpec
from core.types import Conditioning, Predictions, Request, Sample, State

N_TYPES, RADIUS = 3, 1.8
POSITIONS = StreamSpec("positions", RectifiedFlow(), "velocity", ("atom",), ("xyz",), dof="sites-1")


class Network(nn.Module):
    """One equivariant layer (arXiv 2102.09844): atoms are moved along the differences to their neighbours."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_TYPES + 1, width)
        self.edge = nn.Sequential(nn.Linear(2 * width + 3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.pull = nn.Linear(width, 1, bias=False)  # a bias would let padding pull
        self.types = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, N_TYPES))

    def forward(self, x: Tensor, types: Tensor, t: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        h, (b, n) = self.embed(types), types.shape
        apart, size = x[:, :, None] - x[:, None], valid.sum(1).float()
        square = apart.square().sum(-1, keepdim=True)
        facts = torch.stack([t, size / 8], dim=-1)[:, None, None].expand(b, n, n, 2)
        ends = [h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)]
        pair = torch.cat([*ends, facts, torch.log1p(square)], dim=-1)
        message = self.edge(pair) * valid[:, None, :, None] / expand(size, pair)
        seen = torch.cat([h, message.sum(2), expand(t, h).expand(b, n, 1)], dim=-1)
        return (apart / (1 + square).sqrt() * self.pull(message)).sum(2), self.types(seen)


class MoleculeAdapter(Adapter):
    streams = (POSITIONS, StreamSpec("types", MaskedCategorical(N_TYPES), "logits", ("atom",), weight=2.0))

    def __init__(self) -> None:
        self.network = Network()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"network": self.network}

    def encode(self, requests: Sequence[Request]) -> Conditioning:
        return Conditioning({}, tuple(dict(r.geometry) for r in requests))

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        sites = [(g["n_atoms"],) for g in cond.geometry]
        return {"positions": Layout(sites, (3,)), "types": Layout(sites)}

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        x, types = noisy["positions"], noisy["types"]
        move, logits = self.network(x.value, types.value, t, x.valid)
        return {"positions": move, "types": logits}

    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        samples = []
        for g, x, kinds in zip(cond.geometry, clean["positions"].value.cpu(), clean["types"].value.cpu(), strict=True):
            parts = {"xyz": x[: g["n_atoms"]].float(), "types": kinds[: g["n_atoms"]]}
            known = bool(((parts["types"] >= 0) & (parts["types"] < N_TYPES)).all())
            samples.append(Sample(parts, ok=known and bool(torch.isfinite(parts["xyz"]).all())))
        return samples


class Shape:
    """Radius of gyration near RADIUS teaches the positions, the share of type 0 teaches the types."""

    scores = (ScoreSpec("radius", -10.0, 0.0, ("positions",)), ScoreSpec("composition", 0.0, 1.0, ("types",)))
    scope = "sample"
    needs = frozenset({"xyz", "types"})

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        radius, share = torch.full((2, len(samples)), float("nan"))
        for i, s in enumerate(samples):
            if s.ok:
                radius[i] = -(s.parts["xyz"].square().sum(-1).mean().sqrt() - RADIUS).abs()
                share[i] = (s.parts["types"] == 0).float().mean()
        scores = {"radius": radius, "composition": share}
        return RewardResult(scores, {name: x.isfinite() for name, x in scores.items()})


def make_requests(n: int, seed: int) -> list[Request]:
    counts = torch.randint(3, 8, (n,), generator=torch.Generator().manual_seed(seed))
    return [Request(geometry={"n_atoms": n}) for n in counts.tolist()]


def data(state: State, requests: Sequence[Request], generator: torch.Generator) -> State:
    x, types = state["positions"], state["types"]
    xyz = POSITIONS.project(0.6 * torch.randn(x.value.shape, generator=generator), x.valid)
    kinds = torch.randint(0, N_TYPES, types.value.shape, generator=generator)
    return {"positions": x.with_value(xyz), "types": types.with_value(torch.where(types.valid, kinds, 0))}
