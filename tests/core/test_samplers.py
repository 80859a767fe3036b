"""Samplers on analytic fields: order of convergence, equivalences, and sites that must not move."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.errors import UserError
from core.guidance import Guidance
from core.kernels import Kernel
from core.processes import EDM, Gaussian, MaskedCategorical, RectifiedFlow, Torus, VariancePreserving
from core.rollout import RolloutConfig, generate
from core.samplers import SAMPLERS, Step, euler, stochastic
from core.schedules import dynamic_grid, explicit_grid, linear_grid, static_grid
from core.streams import StreamSpec
from core.types import Field, Noise, Predictions, Request, State, index_noise, index_state
from tests.core.tiny import SHAPES, Tiny, experience

MEAN, STD = 0.8, 0.4  # of the data


def spec_of(process: object, prediction: str = "velocity") -> StreamSpec:
    return StreamSpec("x", process, prediction, ("site",))


def exact(process: Gaussian, t: Tensor, z: Tensor) -> Tensor:
    """The probability-flow ODE's solution for Gaussian data: the standard score z is conserved."""
    c = process.coefficients(t)
    return c.a * MEAN + torch.sqrt(c.a**2 * STD**2 + c.s**2) * z


def field(process: Gaussian, prediction: str):
    def predict(state: State, t: Tensor) -> Predictions:
        x, c = state["x"].value, process.at(t, state["x"].value)
        x0 = MEAN + c.a * STD**2 / (c.a**2 * STD**2 + c.s**2) * (x - c.a * MEAN)
        return {"x": process.convert(x, x0, t, "x0", prediction)}

    return predict


@pytest.mark.parametrize(("process", "prediction", "start"), [
    (RectifiedFlow(), "velocity", 0.95), (RectifiedFlow(), "velocity", 1.0), (RectifiedFlow(), "x0", 0.95),
    (VariancePreserving(), "v", 0.95), (EDM(), "eps", 0.6),
], ids=["flow", "flow_from_1", "flow_x0", "vp", "edm"])  # fmt: skip
@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2), ("unipc", 2)])
def test_order_of_convergence(process: Gaussian, prediction: str, start: float, name: str, order: int) -> None:
    z, errors = torch.tensor([[-1.3, 0.2, 2.0]], dtype=torch.float64), []
    for n in (32, 64, 128):
        grid = torch.linspace(start, 0.1, n + 1, dtype=torch.float64)
        state = {"x": Field.dense(exact(process, grid[0], z))}
        out = SAMPLERS[name](field(process, prediction), state, {"x": z}, grid, [spec_of(process, prediction)])
        errors.append(float((out["x"].value - exact(process, grid[-1], z)).abs().max()))
    measured = math.log2(errors[1] / errors[2])
    assert order - 0.25 < measured < (1.5 if order == 1 else 3.6), f"errors {errors}"
    assert errors[2] < (1e-2 if order == 1 else 1e-3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_second_order_beats_euler(name: str) -> None:
    z, flow = torch.tensor([[-1.3, 0.2, 2.0]]), RectifiedFlow()
    grid, error = static_grid(16, 3.0), {}
    for sampler in ("euler", name):
        out = SAMPLERS[sampler](field(flow, "velocity"), {"x": Field.dense(z)}, {"x": z}, grid, [spec_of(flow)])
        error[sampler] = float((out["x"].value - (MEAN + STD * z)).abs().max())
    assert name == "euler" or error[name] < error["euler"] / 1.5


FULL = [
    (RectifiedFlow(), "velocity"), (RectifiedFlow(), "x0"), (VariancePreserving(), "v"), (VariancePreserving(), "x0"),
    (VariancePreserving(), "velocity"), (VariancePreserving("linear"), "eps"), (EDM(), "edm_f"), (EDM(), "eps"),
]  # fmt: skip


@pytest.mark.parametrize(("process", "prediction"), FULL, ids=lambda x: x if isinstance(x, str) else repr(x)[:28])
@pytest.mark.parametrize("name", SAMPLERS)
def test_from_pure_noise_to_data_in_float32(name: str, process: Gaussian, prediction: str) -> None:
    """The default grid starts at t = 1 exactly, and nothing blows up there or at 0."""
    z = torch.tensor([[-1.3, 0.2, 2.0]])
    state = {"x": Field.dense(exact(process, torch.tensor(1.0), z))}
    out = SAMPLERS[name](field(process, prediction), state, {"x": z}, linear_grid(40), [spec_of(process, prediction)])
    torch.testing.assert_close(out["x"].value, MEAN + STD * z, rtol=0, atol=0.08)


@pytest.mark.parametrize("name", [*SAMPLERS, "stochastic"])
def test_an_oracle_is_exact_in_one_step(name: str) -> None:
    """One step with the true velocity of the pair (x0, noise) returns x0, whatever the solver."""
    flow, x0 = RectifiedFlow(), torch.randn(2, 5, dtype=torch.float64)
    noise = torch.randn(2, 5, dtype=torch.float64)
    sampler = SAMPLERS.get(name) or stochastic(Kernel("flow_sde"), lambda k: {"x": noise})
    start = {"x": Field.dense(noise)}
    out = sampler(lambda s, t: {"x": noise - x0}, start, {"x": noise}, linear_grid(1), [spec_of(flow)])
    torch.testing.assert_close(out["x"].value, x0)


# ---- the stochastic sampler ----


def rollout(adapter: Tiny, sampler: object, grid: Tensor, *, groups: int = 2) -> tuple[State, State]:
    exp = experience(adapter, groups=groups)
    noise = adapter.draw(exp.cond, [torch.Generator().manual_seed(k) for k in range(len(exp))])
    prior = adapter.prior(noise, exp.cond)
    return prior, sampler(adapter.guidance.bind(adapter, exp.cond), prior, noise, grid, adapter.streams)


def step_noise(adapter: Tiny):
    exp = experience(adapter)
    return lambda k: adapter.draw(exp.cond, [torch.Generator().manual_seed(100 * k + i) for i in range(len(exp))])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [Kernel("ode", 0.7), *(Kernel(n, 0.0) for n in ("flow_sde", "dance_sde", "cps"))])
def test_zero_noise_is_euler_bit_for_bit(kernel: Kernel, shape: str) -> None:
    adapter, grid = Tiny(shape), static_grid(6, 3.0)
    _, expected = rollout(adapter, euler, grid)
    _, out = rollout(adapter, stochastic(kernel, step_noise(adapter)), grid)
    assert torch.equal(out["x"].value, expected["x"].value)


def test_only_chosen_steps_draw() -> None:
    adapter, grid, drawn, recorded = Tiny(), static_grid(6, 3.0), [], []

    def noise(k: int) -> Noise:
        drawn.append(k)
        return step_noise(adapter)(k)

    rollout(adapter, stochastic(Kernel(), noise), grid)
    assert drawn == [0, 1, 2, 3, 4]  # all but the last
    drawn.clear()
    _, a = rollout(adapter, stochastic(Kernel(), noise, noisy_steps=(1, 3), record=recorded.append), grid)
    assert drawn == [1, 3]
    assert [float(step.t[0]) for step in recorded] == [float(grid[1]), float(grid[3])]
    _, b = rollout(adapter, stochastic(Kernel(), noise, noisy_steps=()), grid)
    assert torch.equal(b["x"].value, rollout(adapter, euler, grid)[1]["x"].value)
    assert not torch.equal(a["x"].value, b["x"].value)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
def test_recorded_scores_are_those_of_the_kernel(name: str) -> None:
    adapter, steps = Tiny("ragged", given=1), []
    kernel, grid = Kernel(name, 0.6), static_grid(5, 2.0)
    _, out = rollout(adapter, stochastic(kernel, step_noise(adapter), record=steps.append), grid)
    exp, flow = experience(adapter), RectifiedFlow()
    for before, after in zip(steps, steps[1:], strict=False):
        assert torch.equal(before.after["x"].value, after.before["x"].value)
    assert not torch.equal(steps[-1].after["x"].value, out["x"].value)
    step: Step
    for step in steps:
        f, after = step.before["x"], step.after["x"].value
        v = adapter.forward(step.before, step.t, exp.cond)["x"]
        x0, eps = flow.split(f.value, v, step.t, "velocity")
        mean, std = kernel.mean_std(flow, x0, eps, step.t, step.t_next, t_max=grid[1])
        log_p = torch.distributions.Normal(mean, std[:, None, None]).log_prob(after)
        for row in range(len(exp)):
            expected = log_p[row][f.acted[row]].mean()
            torch.testing.assert_close(step.log_prob["x"][row], expected, rtol=1e-4, atol=1e-4)


def test_stochastic_keeps_the_law_of_the_data() -> None:
    """Fine CPS and SDE sampling of a Gaussian ends with its mean and standard deviation."""
    flow, g = RectifiedFlow(), torch.Generator().manual_seed(0)
    z = torch.randn(4000, 1, generator=g)
    for name in ("flow_sde", "dance_sde", "cps"):
        sampler = stochastic(Kernel(name, 0.3), lambda k: {"x": torch.randn(4000, 1, generator=g)})
        out = sampler(field(flow, "velocity"), {"x": Field.dense(z)}, {"x": z}, linear_grid(60), [spec_of(flow)])
        assert float(out["x"].value.mean()) == pytest.approx(MEAN, abs=0.03)
        assert float(out["x"].value.std()) == pytest.approx(STD, abs=0.04)


# ---- sites and samples ----


@pytest.mark.parametrize("name", [*SAMPLERS, "stochastic"])
def test_sites_that_are_not_acted_never_move(name: str) -> None:
    adapter = Tiny("ragged", given=2)
    seen: list[Tensor] = []
    forward = adapter.predict
    adapter.predict = lambda noisy, *rest: seen.append(noisy["x"].value.clone()) or forward(noisy, *rest)
    sampler = SAMPLERS.get(name) or stochastic(Kernel(), step_noise(adapter))
    prior, out = rollout(adapter, sampler, static_grid(5, 3.0))
    acted = out["x"].acted
    for value in (*seen, out["x"].value):
        assert torch.equal(value[~acted], prior["x"].value[~acted])
    assert (out["x"].value[acted] != prior["x"].value[acted]).all()
    assert (out["x"].value[:, :2] == 0.25).all()
    assert (out["x"].value[~out["x"].valid] == 0.25).all() or not out["x"].value[~out["x"].valid].any()


@pytest.mark.parametrize("name", [*SAMPLERS, "stochastic"])
def test_per_sample_grids_equal_separate_calls(name: str) -> None:
    """Rows with grids of their own, and streams of every kind side by side."""
    specs = [
        StreamSpec("x", RectifiedFlow(), "velocity", ("site",)),
        StreamSpec("angle", Torus(), "velocity", ("site",)),
        StreamSpec("kind", MaskedCategorical(3), "logits", ("site",)),
    ]
    g = torch.Generator().manual_seed(0)
    noise = {s.name: torch.stack([s.process.draw((4,), g) for _ in range(3)]) for s in specs}
    state = {s.name: Field.dense(s.process.prior(noise[s.name])) for s in specs}
    fresh = {"x": torch.randn(3, 4, generator=g)}

    def predict(state: State, t: Tensor) -> Predictions:
        x, kind = state["x"].value, state["kind"].value
        return {
            "x": torch.sin(3 * x) + t[:, None],
            "angle": torch.cos(x) * t[:, None],
            "kind": torch.stack([x, kind.float(), x * 2], dim=-1),
        }

    grids = torch.stack([static_grid(6, shift) for shift in (1.0, 2.0, 5.0)], dim=1)

    def sample(rows: Tensor, grid: Tensor) -> State:
        sampler = SAMPLERS.get(name) or stochastic(Kernel(), lambda k: index_noise(fresh, rows))
        return sampler(predict, index_state(state, rows), index_noise(noise, rows), grid, specs)

    together = sample(torch.arange(3), grids)
    for row in range(3):
        alone = sample(torch.tensor([row]), grids[:, row])
        for key in together:
            torch.testing.assert_close(together[key].value[row], alone[key].value[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(together["x"].value[0], together["x"].value[1])
    assert (together["kind"].value < 3).all()  # everything is revealed at the end


def test_the_given_state_is_not_changed() -> None:
    adapter = Tiny()
    for name in SAMPLERS:
        exp = experience(adapter)
        noise = adapter.draw(exp.cond, [torch.Generator().manual_seed(k) for k in range(len(exp))])
        prior = adapter.prior(noise, exp.cond)
        value, kept = prior["x"].value, prior["x"].value.clone()
        SAMPLERS[name](adapter.guidance.bind(adapter, exp.cond), prior, noise, linear_grid(3), adapter.streams)
        assert prior["x"].value is value
        assert torch.equal(value, kept)


# ---- guidance ----


@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_scale_one_is_no_guidance(rescale: float) -> None:
    adapter, grid = Tiny(), static_grid(4)
    _, plain = rollout(adapter, euler, grid)
    count = adapter.counter.evaluations
    adapter.guidance = Guidance("cfg", 1.0, rescale)
    _, guided = rollout(adapter, euler, grid)
    assert torch.equal(plain["x"].value, guided["x"].value)
    assert adapter.counter.evaluations == 2 * count  # and it costs no second branch


@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_cfg(rescale: float) -> None:
    adapter = Tiny()
    exp, t = experience(adapter), torch.full((6,), 0.5)
    positive = adapter.forward(exp.clean, t, exp.cond)["x"]
    negative = adapter.forward(exp.clean, t, exp.cond, branch="null")["x"]
    out = Guidance("cfg", 3.0, rescale).bind(adapter, exp.cond)(exp.clean, t)["x"]
    guided = negative + 3 * (positive - negative)
    ratio = (positive.flatten(1).std(1) / guided.flatten(1).std(1))[:, None, None]
    torch.testing.assert_close(out, guided * (1 - rescale + rescale * ratio))


def test_rescaled_cfg_does_not_see_padding() -> None:
    adapter = Tiny("ragged")
    guidance, t = Guidance("cfg", 3.0, 0.7), torch.full((6,), 0.5)
    exp = experience(adapter, lengths=[3, 5])
    short = experience(adapter, groups=1, lengths=[3])
    together = guidance.bind(adapter, exp.cond)(exp.clean, t)["x"]
    clean = {"x": Field(*(x[:3, :3] for x in (exp.clean["x"].value, exp.clean["x"].valid, exp.clean["x"].acted)))}
    alone = guidance.bind(adapter, short.cond)(clean, t[:3])["x"]
    torch.testing.assert_close(together[:3, :3], alone)


def test_noise_prediction_refuses_a_grid_from_pure_noise() -> None:
    adapter = Tiny("tokens", prediction="eps")
    cond = adapter.encode([Request({"c": [0.0, 0.0]})])
    with pytest.raises(UserError, match="predicts eps"):
        generate(adapter, cond, [("x", 0)], RolloutConfig(n_steps=3), seed=0)


@pytest.mark.parametrize("bad", [[], [0.0], [float("nan"), 0.5], [0.5, 0.5], [0.2, 0.8], [1.2, 0.5], [0.5, -0.1]])
def test_explicit_grid_refuses_what_does_not_fall_in_0_1(bad: list[float]) -> None:
    with pytest.raises(UserError, match="fall strictly"):
        explicit_grid(bad)


def test_terminal_stretch_needs_two_steps() -> None:
    with pytest.raises(UserError, match="at least 2"):
        dynamic_grid(1, 64, shift_terminal=0.02)
