"""Advantages: flat groups are exact zeros, invalid scores are absent, and nothing else changes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.advantages import Advantage
from core.errors import UserError
from core.rewards import ScoreSpec

FORMS = [
    Advantage(),
    Advantage(scale="global", eps=1e-4, ddof=0),
    Advantage(scale="none", clamp=None),
    Advantage(soft_clip=3.0, clamp=None),
    Advantage(combine="rewards"),
]
forms = st.sampled_from(FORMS)
scores = st.floats(-100, 100, width=32)


def one(advantage: Advantage, values: Tensor | list[float], group: Tensor, valid: Tensor | None = None) -> Tensor:
    """The advantage of a single reward for a single stream."""
    x = torch.as_tensor(values, dtype=torch.float32)
    ok = torch.ones(len(x), dtype=torch.bool) if valid is None else valid
    return advantage({"r": x}, {"r": ok}, group, [ScoreSpec("r", -1e9, 1e9)], ["x"])["x"]


def groups(n: int, size: int) -> Tensor:
    return torch.arange(n).repeat_interleave(size)


@st.composite
def batches(draw: st.DrawFn, distinct: bool = False) -> tuple[Tensor, Tensor]:
    """Scores of 1 to 4 groups of different sizes, in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    group = torch.tensor(draw(st.permutations([k for k, size in enumerate(sizes) for _ in range(size)])))
    values = draw(st.lists(scores, min_size=len(group), max_size=len(group), unique=distinct))
    return torch.tensor(values, dtype=torch.float32), group


# ---- flat groups ----


@given(
    st.one_of(st.sampled_from([0.1, 1e-8, 1e6, 1 / 3, 0.0, -0.7, 16777217.0, 1e-38]), st.floats(-1e6, 1e6, width=32)),
    st.integers(1, 24),
    forms,
)
def test_flat_groups_are_exactly_zero(value: float, size: int, form: Advantage) -> None:
    """A second group with spread keeps the whole batch's std away from zero."""
    x = torch.tensor([value] * size + [1.0, 2.0, 4.0])
    group = torch.tensor([0] * size + [1, 1, 1])
    out = one(form, x, group)
    assert torch.equal(out[:size], torch.zeros(size))
    assert (out[size:] != 0).any()
    assert torch.equal(one(form, x[:size], group[:size]), torch.zeros(size))


def test_rounding_residue_of_equal_scores_is_flat() -> None:
    """The same score reached by two orders of summation differs in the last bit; that teaches nothing."""
    x = torch.tensor([0.1 + 0.2, 0.3]).double().float().repeat(3)
    x[0] = torch.nextafter(x[0], torch.tensor(1.0))
    assert torch.equal(one(Advantage(), x, torch.zeros(6, dtype=torch.int64)), torch.zeros(6))


def test_a_small_but_real_spread_is_not_flat() -> None:
    x = torch.tensor([20.0, 20.001, 20.0, 20.001])
    out = one(Advantage(), x, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(out, torch.tensor([-1.0, 1, -1, 1]) * math.sqrt(3) / 2, rtol=1e-3, atol=0)


# ---- validity ----


@given(batches(), st.data(), forms)
def test_invalid_is_as_if_absent(batch: tuple[Tensor, Tensor], data: st.DataObject, form: Advantage) -> None:
    x, group = batch
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    garbage = data.draw(st.sampled_from([math.nan, math.inf, -1e30, 0.0]))
    out = one(form, torch.where(valid, x, garbage), group, valid)
    assert torch.equal(out[~valid], torch.zeros(int((~valid).sum())))
    if valid.any():
        torch.testing.assert_close(out[valid], one(form, x[valid], group[valid]), rtol=1e-5, atol=1e-6)
    else:
        assert not out.any()


@given(scores, forms, st.integers(1, 6))
def test_a_single_valid_sample_teaches_nothing(value: float, form: Advantage, size: int) -> None:
    x = torch.full((size,), math.nan)
    x[0] = value
    valid = torch.arange(size) == 0
    assert torch.equal(one(form, x, torch.zeros(size, dtype=torch.int64), valid), torch.zeros(size))


def test_an_invalid_score_does_not_count_as_zero() -> None:
    """Two good scores and a failure: the failure must not make them look better or worse."""
    valid = torch.tensor([True, True, False])
    out = one(Advantage(), [1.0, 3.0, math.nan], torch.zeros(3, dtype=torch.int64), valid)
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0, 0.0]) / math.sqrt(2), rtol=1e-6, atol=0)


# ---- symmetries ----


@given(batches(), st.data(), forms)
def test_permutation_equivariance(batch: tuple[Tensor, Tensor], data: st.DataObject, form: Advantage) -> None:
    x, group = batch
    idx = torch.tensor(data.draw(st.permutations(range(len(x)))))
    torch.testing.assert_close(one(form, x[idx], group[idx]), one(form, x, group)[idx], rtol=1e-5, atol=1e-6)
    renamed = (group * 7 + 3) % 11  # group numbers carry no meaning
    torch.testing.assert_close(one(form, x, renamed), one(form, x, group), rtol=1e-5, atol=1e-6)


@given(batches(), st.floats(1e-2, 1e3), st.floats(-10, 10), st.sampled_from([FORMS[0], FORMS[3], FORMS[4]]))
def test_scale_and_shift_invariance(batch: tuple[Tensor, Tensor], scale: float, shift: float, form: Advantage) -> None:
    x, group = batch
    x = x.round()  # spread of at least 1, or none
    moved = (scale * x.double() + shift).float()
    tolerance = 1e-3 + 1e-5 * abs(shift) / scale
    torch.testing.assert_close(one(form, moved, group), one(form, x, group), rtol=tolerance, atol=tolerance)


@given(batches(distinct=True))
def test_groups_are_independent_centred_and_of_unit_spread(batch: tuple[Tensor, Tensor]) -> None:
    x, group = batch
    x = x.round()
    form = Advantage(clamp=None)
    out = one(form, x, group)
    for g in group.unique():
        mine = group == g
        torch.testing.assert_close(out[mine], one(form, x[mine], torch.zeros(int(mine.sum()), dtype=torch.int64)))
        assert abs(float(out[mine].double().mean())) < 1e-5
        if len(x[mine].unique()) > 1:
            assert float(out[mine].std()) == pytest.approx(1, rel=1e-4)
        order = x[mine].argsort()
        assert (out[mine][order].diff() >= -1e-6).all()


# ---- limits ----


@given(st.floats(-1e4, 1e4), st.floats(0.1, 100))
def test_soft_clip(a: float, eta: float) -> None:
    """Slope 1 at zero, bounded by eta, the identity for a large eta."""
    x = torch.tensor([a], dtype=torch.float64, requires_grad=True)
    y = Advantage(clamp=None, soft_clip=eta).limit(x)
    assert abs(float(y)) <= eta
    assert float(y) == pytest.approx(eta * math.tanh(a / eta), rel=1e-9)
    at_zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(Advantage(clamp=None, soft_clip=eta).limit(at_zero), at_zero)[0]
    assert float(slope) == pytest.approx(1)
    assert float(Advantage(clamp=None, soft_clip=1e7).limit(x)) == pytest.approx(a, rel=1e-5)
    assert float(Advantage(clamp=2.0).limit(x)) == max(-2.0, min(2.0, a))


def test_both_limits_apply_to_the_combination() -> None:
    x = torch.tensor([100.0] + [0.0] * 99)
    group = torch.zeros(100, dtype=torch.int64)
    assert float(one(Advantage(clamp=None), x, group)[0]) == pytest.approx(9.9, abs=0.1)
    assert float(one(Advantage(clamp=5.0), x, group)[0]) == 5
    assert float(one(Advantage(clamp=5.0, soft_clip=3.0), x, group)[0]) == pytest.approx(3 * math.tanh(5 / 3))


# ---- several rewards and streams ----

SPECS = [ScoreSpec("clip", 0, 1), ScoreSpec("sync", 0, 1, ("audio",)), ScoreSpec("sharp", 0, 1, ("video",))]


def several(seed: int = 0, n: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    values = {spec.name: torch.rand(n, generator=g) for spec in SPECS}
    return values, {spec.name: torch.ones(n, dtype=torch.bool) for spec in SPECS}, groups(2, n // 2)


@pytest.mark.parametrize("weights", [None, {"clip": 1.0, "sync": 0.5, "sharp": 2.0}])
def test_each_score_teaches_its_streams(weights: dict[str, float] | None) -> None:
    values, valid, group = several()
    out = Advantage(weights=weights, clamp=None)(values, valid, group, SPECS, ["video", "audio"])
    w = weights or dict.fromkeys(values, 1.0)
    alone = {name: one(Advantage(clamp=None), x, group) for name, x in values.items()}
    torch.testing.assert_close(out["video"], w["clip"] * alone["clip"] + w["sharp"] * alone["sharp"])
    torch.testing.assert_close(out["audio"], w["clip"] * alone["clip"] + w["sync"] * alone["sync"])


def test_a_stream_that_no_score_teaches_is_left_out() -> None:
    values, valid, group = several()
    out = Advantage(weights={"sync": 1.0, "clip": 0.0})(values, valid, group, SPECS, ["video", "audio"])
    assert set(out) == {"audio"}
    with pytest.raises(UserError, match="no score teaches any stream"):
        Advantage(weights={"sharp": 1.0})(values, valid, group, SPECS, ["audio"])


def test_combining_advantages_or_rewards() -> None:
    """Advantages first: a score of tiny range counts as much. Rewards first: it is drowned."""
    values, valid, group = several()
    values = {"clip": values["clip"], "sync": 1e-3 * values["sync"]}
    specs = [ScoreSpec("clip", 0, 1), ScoreSpec("sync", 0, 1)]
    first = Advantage(clamp=None)(values, valid, group, specs, ["x"])["x"]
    torch.testing.assert_close(first, sum(one(Advantage(clamp=None), x, group) for x in values.values()))
    total = Advantage(clamp=None, combine="rewards")(values, valid, group, specs, ["x"])["x"]
    torch.testing.assert_close(total, one(Advantage(clamp=None), sum(values.values()), group))
    assert (total - one(Advantage(clamp=None), values["clip"], group)).abs().max() < 0.02


def test_one_failed_score_of_two() -> None:
    """It is missing from the sum of advantages; in the sum of rewards the whole sample is missing."""
    values, valid, group = several()
    valid["sync"] = valid["sync"] & (torch.arange(6) != 2)
    values["sync"][2] = math.nan
    specs = [ScoreSpec("clip", 0, 1), ScoreSpec("sync", 0, 1)]
    first = Advantage()(values, valid, group, specs, ["x"])["x"]
    assert float(first[2]) == pytest.approx(float(one(Advantage(), values["clip"], group)[2]), rel=1e-6)
    total = Advantage(combine="rewards")(values, valid, group, specs, ["x"])["x"]
    assert float(total[2]) == 0
    others = torch.arange(6) != 2
    absent = one(Advantage(), (values["clip"] + values["sync"])[others], group[others])
    torch.testing.assert_close(total[others], absent)
    assert torch.isfinite(first).all()


def test_flat_in_one_score_only() -> None:
    values, valid, group = several()
    values["sync"][:] = 0.1
    specs = [ScoreSpec("clip", 0, 1), ScoreSpec("sync", 0, 1)]
    out = Advantage()(values, valid, group, specs, ["x"])["x"]
    torch.testing.assert_close(out, one(Advantage(), values["clip"], group))


def test_an_unknown_weight_names_the_close_match() -> None:
    values, valid, group = several()
    with pytest.raises(UserError, match=r"'shrap'.*did you mean 'sharp'") as error:
        Advantage(weights={"shrap": 1.0})(values, valid, group, SPECS, ["video"])
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="clip") as error:
        Advantage(weights={"zzz": 1.0})(values, valid, group, SPECS, ["video"])
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("options", [{"scale": "batch"}, {"combine": "sum"}, {"clamp": 0.0}, {"soft_clip": -1.0}])
def test_illegal_options(options: dict) -> None:
    with pytest.raises(UserError, match=f"advantage.{next(iter(options))}"):
        Advantage(**options)
