import pytest
import torch

from core import schedules
from tests.parity.cases import Entry, by_id, entries

MU_OPTIONS = {
    "flux1": {},
    "qwen_image": {"base_tokens": 256, "max_tokens": 8192, "base_shift": 0.5, "max_shift": 0.9},
}


@pytest.mark.parametrize("entry", [e for e in entries("time_shift") if "mu" in e.outputs], ids=by_id)
def test_mu(entry: Entry) -> None:
    p, tokens = entry.params, entry["seq_len"].flatten().tolist()
    if "num_steps" in entry.inputs:
        steps = entry["num_steps"].flatten().tolist()
        mu = [schedules.flux2_mu(n, k) for n in tokens for k in steps]
    else:
        names = {"base_seq": "base_tokens", "max_seq": "max_tokens"}
        mu = [schedules.linear_mu(n, **{names.get(k, k): v for k, v in p.items() if k != "model"}) for n in tokens]
    entry.check("mu", torch.tensor(mu, dtype=torch.float64).reshape(entry["mu"].shape))


@pytest.mark.parametrize("entry", [e for e in entries("time_shift") if "sigmas" in e.outputs], ids=by_id)
def test_grid(entry: Entry) -> None:
    p = entry.params
    if "shift" in p:
        build = schedules.scheduler_grid if "double shift" in p.get("path", "") else schedules.static_grid
        entry.check("sigmas", build(p["num_steps"], p["shift"]))
        return
    if p.get("time_shift_type") == "linear":
        sigmas = schedules.linear_grid(p["num_steps"])[:-1].double()
        entry.check("sigmas", schedules.append_zero(schedules.linear_type_shift(sigmas, p["mu"])))
        return
    n, tokens, terminal = p["num_steps"], p["seq_len"], p.get("shift_terminal")
    entry.check("sigmas", schedules.dynamic_grid(n, tokens, shift_terminal=terminal, mu=p["mu"]))
    if p["model"] == "flux2":
        assert schedules.flux2_mu(tokens, n) == pytest.approx(p["mu"], rel=1e-12)
    else:
        grid = schedules.dynamic_grid(n, tokens, shift_terminal=terminal, **MU_OPTIONS[p["model"]])
        entry.check("sigmas", grid)
