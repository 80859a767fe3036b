"""A tiny adapter, and the experience of one iteration with it, for tests of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.adapter import Adapter, Layout
from core.processes import Gaussian, RectifiedFlow
from core.schedules import static_grid
from core.snapshots import Snapshots
from core.streams import StreamSpec
from core.surrogate import Experience
from core.types import Conditioning, Field, Noise, Predictions, Request, Sample, State

SHAPES: dict[str, tuple[tuple[str, ...], tuple[int, ...], int]] = {
    "image": (("height", "width"), (3, 2), 3),
    "tokens": (("token",), (5,), 4),
    "video": (("frame", "height", "width"), (2, 2, 2), 2),
    "ragged": (("token",), (0,), 3),  # the request says how many
}


class Net(nn.Module):
    """A site sees itself, the time, the condition and the mean over the valid sites of its own sample."""

    def __init__(self, channels: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Linear(2 * channels + 3, 7, dtype=dtype)
            self.outer = nn.Linear(7, channels, dtype=dtype)

    def forward(self, x: Tensor, valid: Tensor, t: Tensor, c: Tensor) -> Tensor:
        axes, mask = tuple(range(1, valid.ndim)), valid.unsqueeze(-1)
        mean = (torch.where(mask, x, 0).sum(axes, keepdim=True) / mask.sum(axes, keepdim=True)).expand_as(x)
        each = torch.cat([t[:, None], c], dim=1).to(x.dtype)
        each = each.reshape(len(x), *(1 for _ in axes), 3).expand(*x.shape[:-1], 3)
        return self.outer(torch.tanh(self.inner(torch.cat([x, mean, each], dim=-1))))


@dataclass
class Call:
    """What one network evaluation saw."""

    value: Tensor
    t: Tensor
    grad: bool
    member: Tensor


class Tiny(Adapter):
    """shape: a key of SHAPES. given: how many leading token sites the policy does not produce (ragged only)."""

    def __init__(
        self,
        shape: str = "tokens",
        *,
        process: Gaussian | None = None,
        prediction: str = "velocity",
        dtype: torch.dtype = torch.float32,
        given: int = 0,
        seed: int = 0,
    ) -> None:
        axes, self.sites, self.channels = SHAPES[shape]
        self.streams = (StreamSpec("x", process or RectifiedFlow(), prediction, axes, ("channel",)),)
        self.dtype, self.given = dtype, given
        self.net = Net(self.channels, dtype, seed)
        self.calls: list[Call] = []

    def encode(self, requests: Sequence[Request]) -> Conditioning:
        c = torch.tensor([request.inputs["c"] for request in requests], dtype=torch.float32)
        member = torch.zeros(len(requests), dtype=torch.int64)
        return Conditioning({"c": c, "row": member}, tuple(dict(request.geometry) for request in requests))

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        sites = [(g["n"],) if "n" in g else self.sites for g in cond.geometry]
        layout = Layout(sites, (self.channels,))
        acted = layout.valid()
        if self.given:
            acted[:, : self.given] = False
        given = torch.full((len(sites), *layout.padded, self.channels), 0.25, dtype=self.dtype)
        return {"x": Layout(sites, (self.channels,), acted, given)}

    def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
        return {name: x.to(self.dtype) for name, x in super().draw(cond, generators).items()}

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        x, c = noisy["x"], cond.tensors["c"]
        self.calls.append(Call(x.value.detach().clone(), t.clone(), torch.is_grad_enabled(), cond.tensors["row"]))
        return {"x": self.net(x.value, x.valid, t, c if branch == "cond" else torch.zeros_like(c))}

    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        return [Sample({"x": row}) for row in clean["x"].value]

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    # ---- what tests do with it ----

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def snapshots(self, *names: str) -> Snapshots:
        out = Snapshots(self.parameters)
        for name in names:
            out.take(name)
        return out

    def nudge(self, size: float, seed: int = 0) -> None:
        """Move every parameter by ``size`` times a standard normal."""
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(size * torch.randn(p.shape, generator=g, dtype=p.dtype))

    def gradient(self) -> Tensor:
        """All gradients in one vector, in float64; cleared afterwards."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.net.parameters()]
        self.net.zero_grad(set_to_none=True)
        return torch.cat([part.double().flatten() for part in parts])


def experience(
    adapter: Tiny,
    *,
    groups: int = 2,
    size: int = 3,
    iteration: int = 0,
    n_steps: int = 8,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Experience:
    """Random clean samples and advantages. lengths: sites of each group (ragged shapes)."""
    ragged = adapter.sites == (0,)
    lengths = lengths or [3 + 2 * (k % 2) for k in range(groups)]
    g = torch.Generator().manual_seed(seed)
    requests = [
        Request({"c": torch.randn(2, generator=g).tolist()}, {"n": lengths[k]} if ragged else {}) for k in range(groups)
    ]
    group = torch.arange(groups).repeat_interleave(size)
    cond = adapter.encode([requests[k] for k in group.tolist()])
    cond = Conditioning(cond.tensors | {"row": torch.arange(len(group))}, cond.geometry)
    noise = adapter.draw(cond, [torch.Generator().manual_seed(1000 * seed + k) for k in range(len(group))])
    state: State = {
        name: Field(torch.where(f.valid.reshape(*f.valid.shape, 1), 0.7 * f.value + 0.2, f.value), f.valid, f.acted)
        for name, f in adapter.prior(noise, cond).items()
    }
    advantage = torch.randn(len(group), generator=g)
    return Experience(
        state, cond, group, torch.arange(size).repeat(groups), static_grid(n_steps, 2.0), iteration, {"x": advantage}
    )
