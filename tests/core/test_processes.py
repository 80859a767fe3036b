"""Forward processes and stochastic kernels against their definitions, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.errors import UserError
from core.kernels import Kernel
from core.processes import EDM, Gaussian, MaskedCategorical, RectifiedFlow, Torus, VariancePreserving, expand

GAUSSIAN = {
    "flow": RectifiedFlow(),
    "vp_cosine": VariancePreserving(),
    "vp_linear": VariancePreserving("linear"),
    "edm": EDM(),
    "edm_wide": EDM(sigma_min=0.01, sigma_max=20.0, sigma_data=1.0, rho=3.0),
}
gaussian = pytest.mark.parametrize("process", GAUSSIAN.values(), ids=GAUSSIAN.keys())
inside = st.floats(0.02, 0.98)
seeds = st.integers(0, 10_000)
whole = st.floats(0, 1, width=32)


def pair(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, *(shape or (3, 4)), generator=g, dtype=torch.float64).unbind()


def times(t: float, n: int = 3) -> Tensor:
    return torch.full((n,), t, dtype=torch.float64)


# ---- Gaussian ----


@gaussian
@given(t=inside, seed=seeds)
def test_every_prediction_type_converts_to_every_other(process: Gaussian, t: float, seed: int) -> None:
    x0, eps = pair(seed)
    t = times(t)
    noisy = process.perturb(x0, eps, t)
    for source in process.predictions:
        output = process.target(x0, eps, t, source)
        back = process.split(noisy, output, t, source)
        torch.testing.assert_close(back[0], x0, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(back[1], eps, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(process.denoise(noisy, output, t, source), x0, rtol=1e-6, atol=1e-6)
        for to in process.predictions:
            expected = process.target(x0, eps, t, to)
            torch.testing.assert_close(process.convert(noisy, output, t, source, to), expected, rtol=1e-6, atol=1e-5)
            # And back: whatever a network says, not only the truth.
            there = process.convert(noisy, eps + 0.3, t, source, to)
            torch.testing.assert_close(process.convert(noisy, there, t, to, source), eps + 0.3, rtol=1e-6, atol=1e-5)


@gaussian
@given(t=inside, t_next=st.one_of(st.just(0.0), inside), seed=seeds)
def test_an_oracle_steps_along_the_path(process: Gaussian, t: float, t_next: float, seed: int) -> None:
    x0, eps = pair(seed)
    noisy = process.perturb(x0, eps, times(t))
    for prediction in process.predictions:
        output = process.target(x0, eps, times(t), prediction)
        step = process.step(noisy, output, times(t), times(t_next), prediction, eps)
        torch.testing.assert_close(step, process.perturb(x0, eps, times(t_next)), rtol=1e-6, atol=1e-6)


@gaussian
def test_ends(process: Gaussian) -> None:
    x0, eps = pair(0)
    assert torch.equal(process.perturb(x0, eps, times(0.0)), x0)
    far = process.perturb(torch.zeros_like(x0), eps, times(1.0))
    torch.testing.assert_close(process.prior(eps), far, rtol=1e-6, atol=1e-6)
    c = process.coefficients(torch.tensor([0.0, 1.0]))
    assert float(c.a[0]) == 1
    assert float(c.s[0]) == 0
    if isinstance(process, RectifiedFlow) or process == VariancePreserving():
        assert 0 <= float(c.a[1]) < 1e-7


@gaussian
@given(t=inside)
def test_derivatives_are_those_of_the_coefficients(process: Gaussian, t: float) -> None:
    t = times(t, 1).requires_grad_()
    c = process.coefficients(t)
    for value, derivative in ((c.a, c.da), (c.s, c.ds)):
        auto = torch.autograd.grad(value.sum(), t, retain_graph=True)[0] if value.requires_grad else torch.zeros(1)
        torch.testing.assert_close(derivative.detach(), auto.to(derivative.dtype), rtol=1e-9, atol=1e-9)


@gaussian
@given(t=inside, seed=seeds)
def test_velocity_is_the_time_derivative_of_the_path(process: Gaussian, t: float, seed: int) -> None:
    x0, eps = pair(seed)
    path = [process.perturb(x0, eps, times(t + h)) for h in (1e-5, -1e-5)]
    velocity = process.target(x0, eps, times(t), "velocity")
    torch.testing.assert_close((path[0] - path[1]) / 2e-5, velocity, rtol=1e-4, atol=1e-4)
    # derivative() is with respect to clock().
    noisy = process.perturb(x0, eps, times(t))
    d = process.derivative(noisy, velocity, times(t), "velocity")
    clock = [process.clock(times(t + h, 1)) for h in (1e-5, -1e-5)]
    torch.testing.assert_close((path[0] - path[1]) / (clock[0] - clock[1]), d, rtol=1e-4, atol=1e-4)


@given(t=st.floats(0, 1), schedule=st.sampled_from(["cosine", "linear"]))
def test_variance_is_preserved(t: float, schedule: str) -> None:
    c = VariancePreserving(schedule).coefficients(times(t, 1))
    assert float(c.a**2 + c.s**2) == pytest.approx(1, abs=1e-12)


@given(t=st.floats(1e-6, 1))
def test_edm_time_inverts_sigma(t: float) -> None:
    for process in (EDM(), GAUSSIAN["edm_wide"]):
        sigma = process.sigma(times(t, 1))
        assert process.sigma_min <= float(sigma) <= process.sigma_max * (1 + 1e-12)
        assert float(process.time(sigma)) == pytest.approx(t, abs=1e-9)
        assert float(process.time(times(0.0, 1))) == 0
        assert float(process.sigma(times(0.0, 1))) == 0


def test_log_snr_is_finite_or_infinite_never_nan() -> None:
    for process in GAUSSIAN.values():
        snr = process.log_snr_half(torch.linspace(0, 1, 101))
        assert not snr.isnan().any()
        assert (snr.diff() < 0).all() or snr[-1] == -math.inf


@gaussian
@given(t=inside, seed=seeds)
def test_errors_and_distance(process: Gaussian, t: float, seed: int) -> None:
    x0, eps = pair(seed)
    noisy, out = process.perturb(x0, eps, times(t)), eps * 0.7 + 0.1
    for space in process.spaces:
        square, absolute = process.errors(out, x0, eps, noisy, times(t), "eps", space)
        d = process.convert(noisy, out, times(t), "eps", space) - process.target(x0, eps, times(t), space)
        torch.testing.assert_close(square, d * d)
        torch.testing.assert_close(absolute, d.abs())
        perfect = process.target(x0, eps, times(t), "eps")
        distance = process.distance(out, perfect, noisy, times(t), "eps", space)
        torch.testing.assert_close(distance, d * d, rtol=1e-5, atol=1e-8)
        assert not process.distance(out, out, noisy, times(t), "eps", space).any()


def test_unknown_names_are_user_errors() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(UserError, match="velocity"):
        RectifiedFlow().split(x, x, torch.ones(1), "flow")
    with pytest.raises(UserError, match="cosine or linear"):
        VariancePreserving("sigmoid")


# ---- torus ----

angles = st.lists(st.floats(-50, 50), min_size=1, max_size=8)
periods = st.sampled_from([1.0, 2 * math.pi, 0.3])


@given(angles, periods, st.sampled_from([torch.float32, torch.float64]))
def test_wrap_and_shortest_stay_in_their_intervals(values: list[float], period: float, dtype: torch.dtype) -> None:
    process, x = Torus(period), torch.tensor([*values, -1e-9, -1e-30, 0.0, period, -period], dtype=dtype)
    wrapped, short = process.wrap(x), process.shortest(x)
    assert ((wrapped >= 0) & (wrapped < period)).all()
    assert (short.abs() <= period / 2 * (1 + 1e-6)).all()
    for y in (wrapped, short):  # both differ from x by whole periods
        turns = (x.double() - y.double()) / period
        torch.testing.assert_close(turns, turns.round(), rtol=0, atol=1e-4)
    torch.testing.assert_close(process.shortest(wrapped - x), torch.zeros_like(x), rtol=0, atol=1e-4)


@given(seeds, periods, inside, st.one_of(st.just(0.0), inside))
def test_torus_paths(seed: int, period: float, t: float, t_next: float) -> None:
    process, g = Torus(period), torch.Generator().manual_seed(seed)
    x0, x1 = (process.draw((3, 5), g).double() for _ in range(2))
    noisy = process.perturb(x0, x1, times(t))
    for prediction in process.predictions:
        target = process.target(x0, x1, times(t), prediction)
        for other in (x0, process.wrap(x0 + 3 * period)):  # whole turns are the same point
            torch.testing.assert_close(process.target(other, x1, times(t), prediction), target, rtol=0, atol=1e-6)
        clean = process.denoise(noisy, target, times(t), prediction)
        assert process.shortest(clean - x0).abs().max() < 1e-9
        step = process.step(noisy, target, times(t), times(t_next), prediction, x1)
        assert process.shortest(step - process.perturb(x0, x1, times(t_next))).abs().max() < 1e-9
        for space in process.spaces:
            square, absolute = process.errors(target, x0, x1, noisy, times(t), prediction, space)
            assert square.max() < 1e-12
            assert absolute.max() < 1e-6
    length = process.shortest(noisy - x0).abs()
    torch.testing.assert_close(length, t * process.shortest(x1 - x0).abs(), rtol=0, atol=1e-6)


def test_torus_error_is_the_short_way_round() -> None:
    """Predicting 0.99 for 0.01 is an error of 0.02, not of 0.98."""
    process, t = Torus(), times(1.0, 1)
    clean, noise = times(0.01, 1)[:, None], times(0.4, 1)[:, None]
    output = process.shortest(noise - 0.99)
    square, absolute = process.errors(output, clean, noise, noise, t, "velocity", "x0")
    assert float(absolute) == pytest.approx(0.02)
    assert float(square) == pytest.approx(0.0004)


# ---- masked categories ----

N_CLASSES = 5


def categories(seed: int) -> tuple[MaskedCategorical, Tensor, Tensor, Tensor]:
    """process, clean [3, 7], noise [3, 7, 2] with the edges of [0, 1) among the draws, logits of an oracle."""
    process, g = MaskedCategorical(N_CLASSES), torch.Generator().manual_seed(seed)
    clean = torch.randint(N_CLASSES, (3, 7), generator=g)
    noise = process.draw((3, 7), g)
    noise[0, 0], noise[0, 1] = 0.0, 1 - 2.0**-24
    logits = torch.full((3, 7, N_CLASSES), -math.inf).scatter(2, clean.unsqueeze(2), 0.0)
    return process, clean, noise, logits


@given(seeds, whole, whole)
def test_masking_grows_with_time(seed: int, t: float, later: float) -> None:
    process, clean, noise, _ = categories(seed)
    t, later = sorted((t, later))
    early, late = process.perturb(clean, noise, times(t)), process.perturb(clean, noise, times(later))
    assert ((early == N_CLASSES) <= (late == N_CLASSES)).all()
    for x in (early, late):
        assert ((x == clean) | (x == N_CLASSES)).all()
    assert torch.equal(early == N_CLASSES, noise[..., 0] < t)
    assert torch.equal(process.perturb(clean, noise, times(0.0)), clean)
    assert torch.equal(process.perturb(clean, noise, times(1.0)), process.prior(noise))


@given(seeds, whole, whole)
def test_oracle_reveals_at_each_sites_time(seed: int, t: float, t_next: float) -> None:
    """A step lands on the forward path: exactly the sites with t_next <= u are revealed, with the true class."""
    process, clean, noise, logits = categories(seed)
    t_next, t = sorted((t, t_next))
    noisy = process.perturb(clean, noise, times(t))
    step = process.step(noisy, logits, times(t), times(t_next), "logits", noise)
    assert torch.equal(step, process.perturb(clean, noise, times(t_next)))
    whole = process.step(process.prior(noise), logits, times(1.0), times(0.0), "logits", noise)
    assert torch.equal(whole, clean)


def test_revealed_class_follows_the_probabilities() -> None:
    process, g = MaskedCategorical(3), torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.0, 0.5])
    noise = process.draw((1, 20_000), g)
    logits = p.log().expand(1, 20_000, 3)
    out = process.step(process.prior(noise), logits, times(1.0, 1), times(0.0, 1), "logits", noise)
    share = torch.bincount(out.flatten(), minlength=3) / 20_000
    assert share[1] == 0
    assert abs(float(share[0]) - 0.5) < 0.015


@given(seeds, inside)
def test_masked_loss_is_weighted_cross_entropy(seed: int, t: float) -> None:
    process, clean, noise, _ = categories(seed)
    noisy, logits = process.perturb(clean, noise, times(t)), torch.randn(3, 7, N_CLASSES)
    loss, absolute = process.errors(logits, clean, noise, noisy, times(t), "logits", "x0")
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), clean, reduction="none") / t
    expected = torch.where(noise[..., 0] < t, expected, 0.0)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert absolute is None
    assert not process.distance(logits, logits, noisy, times(t), "logits", "x0").any()
    assert (process.distance(logits, logits.flip(-1), noisy, times(t), "logits", "x0") >= -1e-6).all()


# ---- kernels ----

steps = st.tuples(st.floats(0.05, 0.97), st.floats(0.02, 0.95)).map(lambda x: (x[0], x[0] * x[1]))


@given(steps, seeds, st.sampled_from(["ode", "flow_sde", "dance_sde", "cps"]))
def test_zero_noise_is_euler(step: tuple[float, float], seed: int, name: str) -> None:
    flow, (x, v) = RectifiedFlow(), pair(seed)
    t, t_next = times(step[0]), times(step[1])
    x0, eps = flow.split(x, v, t, "velocity")
    mean, std = Kernel(name, 0.0).mean_std(flow, x0, eps, t, t_next)
    torch.testing.assert_close(mean, x + (step[1] - step[0]) * v, rtol=1e-9, atol=1e-12)
    assert not std.any()


@given(steps, st.floats(0.01, 1.0), seeds)
def test_unified_kernel_equals_the_published_steps(step: tuple[float, float], level: float, seed: int) -> None:
    """Flow-GRPO's and DanceGRPO's steps as their papers write them: drift with the score, dt negative."""
    flow, (x, v) = RectifiedFlow(), pair(seed)
    t, t_next = step
    dt = t_next - t
    x0, eps = flow.split(x, v, times(t), "velocity")
    for name, sigma in (("flow_sde", level * math.sqrt(t / (1 - t))), ("dance_sde", level)):
        published = x * (1 + sigma**2 / (2 * t) * dt) + v * (1 + sigma**2 * (1 - t) / (2 * t)) * dt
        mean, std = Kernel(name, level).mean_std(flow, x0, eps, times(t), times(t_next))
        torch.testing.assert_close(mean, published, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(std, times(sigma * math.sqrt(-dt)), rtol=1e-12, atol=0)


@gaussian
@given(step=steps, level=st.floats(0.01, 1.0))
def test_cps_keeps_the_noise_level(process: Gaussian, step: tuple[float, float], level: float) -> None:
    w0, w1, s = Kernel("cps", level).coefficients(process, times(step[0]), times(step[1]))
    c = process.coefficients(times(step[1]))
    torch.testing.assert_close(w1**2 + s**2, c.s**2, rtol=1e-12, atol=0)
    torch.testing.assert_close(w0, c.a, rtol=0, atol=0)
    assert (s > 0).all()


def test_flow_sde_at_pure_noise_uses_the_second_grid_point() -> None:
    t, t_next = torch.tensor([1.0, 0.8]), torch.tensor([0.9, 0.7])
    _, w1, s = Kernel("flow_sde", 0.7).coefficients(RectifiedFlow(), t, t_next, t_max=0.9)
    for k, sigma in enumerate((0.7 * math.sqrt(1 / 0.1), 0.7 * math.sqrt(0.8 / 0.2))):
        assert float(s[k]) == pytest.approx(sigma * math.sqrt(0.1), rel=1e-5)
        assert float(w1[k]) == pytest.approx(float(t_next[k]) - sigma**2 * 0.1 / (2 * float(t[k])), rel=1e-4)


@given(seeds, st.floats(0.05, 2.0))
def test_log_prob_is_the_gaussian_density(seed: int, std: float) -> None:
    value, mean = pair(seed)
    expected = torch.distributions.Normal(mean, std).log_prob(value)
    torch.testing.assert_close(Kernel("dance_sde").log_prob(value, mean, times(std)), expected)
    unscaled = Kernel("cps", score="unscaled").log_prob(value, mean, times(std))
    torch.testing.assert_close(unscaled, -((value - mean) ** 2))
    with pytest.raises(UserError, match="no density"):
        Kernel("dance_sde").log_prob(value, mean, times(0.0))


def test_kernels_refuse() -> None:
    with pytest.raises(UserError, match="flow_sde"):
        Kernel("sde")
    with pytest.raises(UserError, match="negative"):
        Kernel("cps", -0.1)
    with pytest.raises(UserError, match="use cps"):
        Kernel("flow_sde").coefficients(VariancePreserving(), times(0.5), times(0.4))
    assert expand(times(1.0), torch.zeros(3, 2, 2)).shape == (3, 1, 1)
