import math

import pytest
import torch
from torch import Tensor

from core.processes import RectifiedFlow
from core.samplers import SAMPLERS
from core.schedules import append_zero, exponential_shift, linear_grid, scheduler_grid
from core.streams import StreamSpec
from core.types import Field, Predictions, State
from tests.parity.cases import Entry, by_id, entries

OURS = {
    "euler_static": "euler", "euler_dynamic": "euler", "heun": "heun",
    "dpmpp2m_midpoint": "dpmpp_2m", "unipc_bh2": "unipc",
}  # fmt: skip


def mixture_velocity(entry: Entry, x: Tensor, t: Tensor) -> Tensor:
    """E[noise - data | x] for data from a mixture of isotropic Gaussians, float64; x [B, d], t [B]."""
    w, m, s = (entry[name].double() for name in ("gm_w", "gm_m", "gm_s"))
    x, t = x.double()[:, None], t.double()[:, None, None]
    a = 1 - t
    var = a**2 * s[:, None] ** 2 + t**2  # [B, K, 1]
    delta = x - a * m  # [B, K, d]
    log_g = w.log() - 0.5 * m.shape[1] * (2 * math.pi * var[..., 0]).log() - delta.square().sum(-1) / (2 * var[..., 0])
    parts = (t / var) * delta - m - (a * s[:, None] ** 2 / var) * delta
    return (torch.softmax(log_g, dim=1)[..., None] * parts).sum(1)


@pytest.mark.parametrize("entry", [e for e in entries("solvers") if "trajectory" in e.outputs], ids=by_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_trajectory(entry: Entry, dtype: torch.dtype) -> None:
    x, calls, at = entry["x_init"].to(dtype), [], []

    def predict(state: State, t: Tensor) -> Predictions:
        calls.append(state["x"].value.clone())
        at.append(t[0].clone())
        return {"x": mixture_velocity(entry, state["x"].value, t).to(dtype)}

    spec = StreamSpec("x", RectifiedFlow(), "velocity", (), ("dim",))
    noise, state = {"x": torch.zeros_like(x)}, {"x": Field.dense(x, 1)}
    grid = entry["sigmas"].unique_consecutive()  # diffusers' Heun lists the inner ones twice, once a call
    out = SAMPLERS[OURS[entry.params["solver"]]](predict, state, noise, grid.to(dtype), [spec])

    trajectory = torch.stack([*calls, out["x"].value])
    entry.check("trajectory", trajectory)
    entry.check("sigmas_model", torch.stack(at))
    if dtype == torch.float64:
        entry.check("trajectory64", trajectory)


@pytest.mark.parametrize("entry", [e for e in entries("solvers") if "velocity_at_probe" in e.outputs], ids=by_id)
def test_our_mixture_velocity(entry: Entry) -> None:
    out = [mixture_velocity(entry, x, t.expand(len(x))) for x, t in zip(entry["x"], entry["t"], strict=True)]
    entry.check("velocity_at_probe", torch.stack(out))


EULER = [e for e in entries("solvers") if e.params.get("solver", "").startswith("euler")]


@pytest.mark.parametrize("entry", EULER, ids=by_id)
def test_euler_grids(entry: Entry) -> None:
    n = entry.params["steps"]
    if "mu" in entry.params:
        entry.check("sigmas", append_zero(exponential_shift(linear_grid(n)[:-1].double(), entry.params["mu"])))
    else:
        entry.check("sigmas", scheduler_grid(n, entry.params["shift"]))
