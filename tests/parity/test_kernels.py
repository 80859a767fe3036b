import pytest
import torch
from torch import Tensor

from core.kernels import Kernel
from core.processes import RectifiedFlow, expand
from core.schedules import static_grid
from core.streams import StreamSpec
from tests.parity.cases import Entry, by_id, entries

CASES = [*entries("flow_grpo_sde_step"), *entries("dance_grpo_step"), *entries("cps_step")]
FLOW = RectifiedFlow()


def kernel_of(entry: Entry) -> Kernel:
    if entry.case == "dance_grpo_step":
        return Kernel("dance_sde", entry.params["eta"])
    if entry.case == "cps_step":
        return Kernel("cps", entry.params["noise_level"], score="unscaled")
    return Kernel("flow_sde", entry.params["noise_level"])


def times(entry: Entry) -> tuple[Tensor, Tensor, Tensor]:
    """t, t_next [B] and what stands for t at t = 1."""
    grid, n = entry["sigmas"], len(entry["sample"])
    k = entry["step_index"] if "step_index" in entry.inputs else torch.full((n,), entry.params["index"])
    return grid[k], grid[k + 1], grid[1].expand(n)


@pytest.mark.parametrize("entry", CASES, ids=lambda e: f"{e.case}-{e.id}")
def test_step(entry: Entry) -> None:
    kernel, (t, t_next, t_max) = kernel_of(entry), times(entry)
    axes = tuple(f"a{k}" for k in range(entry["sample"].ndim - 1))
    spec = StreamSpec("x", FLOW, "velocity", axes)
    everywhere = torch.ones(entry["sample"].shape, dtype=torch.bool)
    x0, eps = FLOW.split(entry["sample"], entry["velocity"], t, "velocity")
    mean, std = kernel.mean_std(FLOW, x0, eps, t, t_next, t_max=t_max)
    value = mean + expand(std, mean) * entry["noise"]

    entry.check("mean", mean)
    entry.check("prev_sample", value)
    if "pred_original" in entry.outputs:
        entry.check("pred_original", x0)
    if "std" in entry.params:  # DanceGRPO's is the full std of the step
        assert float(std[0]) == pytest.approx(entry.params["std"], rel=2e-6)
    if "std_dev" in entry.outputs:  # Flow-GRPO's lacks the factor sqrt(t - t_next), CPS's is the full std
        entry.check("std_dev", (std / (t - t_next).sqrt() if kernel.name == "flow_sde" else std).reshape(-1))
    entry.check("log_prob_noise", spec.mean(kernel.log_prob(value, mean, std), everywhere))
    entry.check("log_prob_given", spec.mean(kernel.log_prob(entry["given_prev"], mean, std), everywhere))


@pytest.mark.parametrize("entry", entries("dance_grpo_step"), ids=by_id)
def test_dance_grid(entry: Entry) -> None:
    """Their own grid, shift(linspace(1, 0, n + 1)), is our static grid."""
    grid = static_grid(entry.params["num_steps"], entry.params["shift"])
    torch.testing.assert_close(grid, entry["sigmas"], rtol=2e-6, atol=1e-7)
