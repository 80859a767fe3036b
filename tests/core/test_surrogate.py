"""The V-GRPO surrogate and its two-pass gradient: every line of the checklist in the method's notes (section 8)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.algorithm import Algorithm, Regulariser
from core.errors import UserError
from core.objectives import clipped, slope
from core.processes import EDM, RectifiedFlow, VariancePreserving
from core.rng import generator
from core.schedules import logit_normal_law, shifted_law, stratified_indices, stratified_uniform, uniform_law
from core.surrogate import SHARING, SPACES, TIME_SAMPLERS, Elbo, Experience, variation
from core.types import Field
from core.update import accumulate
from tests.core.tiny import SHAPES, Tiny, experience

SEED = 7


def run(adapter: Tiny, algorithm: Algorithm, exp: Experience, snapshots: object = None) -> dict[str, Tensor]:
    return accumulate(adapter, algorithm, exp, snapshots or adapter.snapshots("old", "ref"), SEED, n_total=len(exp))


def moved(adapter: Tiny, elbo: Elbo, size: float = 0.05, **options: object) -> tuple[Experience, object]:
    """An experience whose old surrogate is that of parameters the policy has since left, and those parameters."""
    exp, snapshots = experience(adapter, **options), adapter.snapshots("old", "ref")
    exp = replace(exp, old=elbo.evaluate(adapter, exp, SEED))
    adapter.nudge(size)
    return exp, snapshots


def with_advantage(exp: Experience, value: Tensor | float) -> Experience:
    return replace(exp, advantage={"x": torch.as_tensor(value, dtype=torch.float32).expand(len(exp)).clone()})


# ---- 1. on policy ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", ["mean", "pair"])
@pytest.mark.parametrize("stored", [False, True], ids=["no_old", "old"])
def test_at_theta_old_the_ratio_is_exactly_one(shape: str, ratio: str, stored: bool) -> None:
    adapter = Tiny(shape)
    regularisers = (Regulariser("old", 0.3), Regulariser("ref", 0.1, "velocity")) if stored else ()
    algorithm = Algorithm(
        Elbo(ratio=ratio), clip=1e-2 if stored else None, regularisers=regularisers, updates=1 + stored
    )
    exp = experience(adapter)
    if stored:
        exp = replace(exp, old=algorithm.elbo.evaluate(adapter, exp, SEED))
    stats = run(adapter, algorithm, exp)
    assert torch.equal(stats["ratio/x"], torch.ones(len(exp)))
    assert torch.equal(stats["approx_kl/x"], torch.zeros(len(exp)))
    torch.testing.assert_close(stats["loss"], -exp.advantage["x"], rtol=1e-6, atol=0)
    for r in regularisers:
        assert torch.equal(stats[f"regulariser/{r.name}"], torch.zeros(len(exp)))


def test_opposite_advantages_cancel() -> None:
    adapter = Tiny()
    exp = experience(adapter)
    plus = run(adapter, Algorithm(), exp)
    grad_plus = adapter.gradient()
    minus = run(adapter, Algorithm(), replace(exp, advantage={"x": -exp.advantage["x"]}))
    assert torch.equal(plus["loss"] + minus["loss"], torch.zeros(len(exp)))
    assert torch.equal(grad_plus, -adapter.gradient())
    assert grad_plus.abs().max() > 0


# ---- 2. the sign ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_pairs", [1, 4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_positive_advantage_lowers_the_clean_error(shape: str, n_pairs: int, sign: float) -> None:
    adapter, plain = Tiny(shape), Elbo(n_pairs=n_pairs, normalize=False)
    exp = with_advantage(experience(adapter), 0.0)
    exp.advantage["x"][1] = sign  # one sample teaches, the others are neutral
    before = -plain.evaluate(adapter, exp, SEED)["x"].mean(0)[1]
    run(adapter, Algorithm(Elbo(n_pairs=n_pairs)), exp)
    with torch.no_grad():
        for p in adapter.net.parameters():
            p.sub_(1e-2 * p.grad)
    after = -plain.evaluate(adapter, exp, SEED)["x"].mean(0)[1]
    assert (after < before) if sign > 0 else (after > before)


# ---- 3. the gradient ----

MODELS = [
    (RectifiedFlow(), "velocity"), (RectifiedFlow(), "velocity_reversed"), (RectifiedFlow(), "x0"),
    (RectifiedFlow(), "eps"), (VariancePreserving(), "v"), (VariancePreserving("linear"), "eps"), (EDM(), "edm_f"),
]  # fmt: skip


@pytest.mark.parametrize(("process", "prediction"), MODELS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_on_policy_gradient(process: object, prediction: str) -> None:
    """-A grad of the mean self-normalised loss; and finite differences with the normaliser frozen."""
    adapter = Tiny("ragged", process=process, prediction=prediction, dtype=torch.float64, given=1)
    exp, elbo = experience(adapter), Elbo(n_pairs=3)
    if prediction == "eps":
        exp = replace(exp, grid=exp.grid * 0.9)  # x0 from eps is 0/0 at t = 1
    mse = -replace(elbo, normalize=False).evaluate(adapter, exp, SEED)["x"]
    weight = mse / -elbo.evaluate(adapter, exp, SEED)["x"]
    run(adapter, Algorithm(elbo), exp)
    grad = adapter.gradient()

    def frozen() -> Tensor:
        """mean_i A_i (1/N) sum_j mse_ij / weight_ij."""
        now = -replace(elbo, normalize=False).evaluate(adapter, exp, SEED)["x"]
        return (exp.advantage["x"] * (now / weight).mean(0)).mean()

    g = torch.Generator().manual_seed(0)
    parameters = list(adapter.net.parameters())
    direction = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in parameters]
    values, h = [], 1e-5
    for step in (h, -2 * h):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(step * d)
        values.append(frozen())
    numeric = (values[0] - values[1]) / (2 * h)
    torch.testing.assert_close(grad @ torch.cat([d.flatten() for d in direction]), numeric, rtol=2e-5, atol=1e-9)


def test_gradient_is_that_of_the_detached_loss() -> None:
    adapter, elbo = Tiny(dtype=torch.float64), Elbo()
    exp = experience(adapter)
    run(adapter, Algorithm(elbo), exp)
    grad = adapter.gradient()
    one_graph(adapter, Algorithm(elbo), exp, None).backward()
    assert_same(grad, adapter.gradient())


# ---- 4. pairs ----


def pairs(adapter: Tiny, exp: Experience, elbo: Elbo, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """t [N, B] and the noise [N, B, ...]."""
    noise = torch.stack([elbo.noise(adapter, exp, j, seed)["x"] for j in range(elbo.n_pairs)])
    return elbo.times(exp, seed), noise


def equal_rows(x: Tensor) -> Tensor:
    """bool [B, B]: whether two samples have equal columns of x [N, B, ...] everywhere."""
    flat = x.transpose(0, 1).flatten(1)
    return (flat[:, None] == flat[None]).all(-1)


@pytest.mark.parametrize("time_sampler", TIME_SAMPLERS)
@pytest.mark.parametrize("share", SHARING)
def test_who_shares_what(share: str, time_sampler: str) -> None:
    adapter = Tiny()
    exp = experience(adapter, groups=3, n_steps=400)
    t, noise = pairs(adapter, exp, Elbo(share=share, time_sampler=time_sampler))
    same_group = exp.group[:, None] == exp.group[None]
    nobody, everybody = torch.eye(len(exp), dtype=torch.bool), torch.ones(len(exp), len(exp), dtype=torch.bool)
    expected_t = {"none": nobody, "t": same_group, "t_noise": same_group, "batch": everybody}[share]
    expected_noise = {"none": nobody, "t": nobody, "t_noise": same_group, "batch": everybody}[share]
    assert torch.equal(equal_rows(t), expected_t)
    assert torch.equal(equal_rows(noise), expected_noise)
    assert not any(torch.equal(noise[j], noise[k]) for j, k in itertools.combinations(range(4), 2))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.sampled_from(SHARING), st.sampled_from(TIME_SAMPLERS))
def test_ranks_and_micro_batches_agree(rows: list[int], share: str, time_sampler: str) -> None:
    """Whatever part of an iteration a process or a micro-batch holds, its samples see the same pairs."""
    adapter, elbo = Tiny(), Elbo(n_pairs=2, share=share, time_sampler=time_sampler)
    exp = experience(adapter, groups=3)
    t, noise = pairs(adapter, exp, elbo)
    idx = torch.tensor(rows)
    part_t, part_noise = pairs(adapter, exp.index(idx), elbo)
    assert torch.equal(part_t, t[:, idx])
    assert torch.equal(part_noise, noise[:, idx])


def test_pairs_are_fresh_in_every_iteration_and_for_every_seed() -> None:
    adapter, elbo = Tiny(), Elbo(time_sampler="independent")
    first = pairs(adapter, experience(adapter), elbo)
    for other in (
        pairs(adapter, experience(adapter, iteration=1), elbo),
        pairs(adapter, experience(adapter), elbo, seed=SEED + 1),
    ):
        assert not (first[0] == other[0]).any()
        assert not (first[1] == other[1]).any()
    again = pairs(adapter, experience(adapter), elbo)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_old_and_new_passes_see_the_same_noisy_samples() -> None:
    adapter, elbo = Tiny(), Elbo()
    exp = experience(adapter)
    old = elbo.evaluate(adapter, exp, SEED)
    seen_old, adapter.calls = adapter.calls, []
    run(adapter, Algorithm(elbo, updates=2), replace(exp, old=old))
    for k, call in enumerate(adapter.calls):  # pass 1 and pass 2, each pair in turn
        assert torch.equal(call.value, seen_old[k % elbo.n_pairs].value)
        assert torch.equal(call.t, seen_old[k % elbo.n_pairs].t)
    assert len(adapter.calls) == 2 * elbo.n_pairs


def test_sharing_noise_across_geometries_is_refused() -> None:
    adapter = Tiny("ragged")
    exp = experience(adapter, lengths=[3, 5])
    with pytest.raises(UserError, match=r"geometry.*surrogate.share=t"):
        Elbo(share="batch").noise(adapter, exp, 0, SEED)
    mixed = replace(exp, group=torch.zeros_like(exp.group), member=torch.arange(len(exp)))
    with pytest.raises(UserError, match="geometry"):
        Elbo().noise(adapter, mixed, 0, SEED)
    assert Elbo(share="t").noise(adapter, mixed, 0, SEED)["x"].shape == exp.clean["x"].value.shape


# ---- 5. stratification ----


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000))
def test_one_index_in_each_part(n: int, n_steps: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    if n > n_steps:
        with pytest.raises(UserError, match=f"n_pairs <= {n_steps}"):
            stratified_indices(n, n_steps, g)
        return
    chosen = stratified_indices(n, n_steps, g).tolist()
    sizes = [n_steps // n + (k < n_steps % n) for k in range(n)]  # contiguous, uneven by at most one
    start = 0
    for index, size in zip(chosen, sizes, strict=True):
        assert start <= index < start + size
        start += size
    assert start == n_steps


@pytest.mark.parametrize("time_sampler", TIME_SAMPLERS)
def test_never_at_the_clean_end(time_sampler: str) -> None:
    adapter = Tiny()
    for iteration in range(50):
        exp = experience(adapter, iteration=iteration, n_steps=4)
        t = Elbo(n_pairs=4, time_sampler=time_sampler).times(exp, SEED)
        assert (t > 0).all()
        assert (t <= 1).all()
        if time_sampler == "stratified_index":
            assert torch.equal(t, exp.grid[:4, None].expand(4, len(exp)))
        if time_sampler == "index":
            assert torch.isin(t, exp.grid[:-1]).all()


def test_per_sample_grids() -> None:
    """With [n + 1, B] grids each sample's times come from its own column."""
    adapter = Tiny()
    exp = experience(adapter, n_steps=4)
    scale = torch.linspace(0.5, 1, len(exp))
    t = Elbo(n_pairs=4).times(replace(exp, grid=exp.grid[:, None] * scale), SEED)
    assert torch.equal(t, exp.grid[:4, None] * scale)


def chi_square(u: Tensor, bins: int = 10) -> float:
    counts = torch.histc(u.double(), bins, 0, 1)
    return float(((counts - len(u) / bins).square() / (len(u) / bins)).sum())


def test_index_is_uniform_in_its_part() -> None:
    draws = torch.stack([stratified_indices(3, 30, generator(k, "test")) for k in range(3000)])
    for j in range(3):
        assert chi_square((draws[:, j] - 10 * j) / 10 + 0.05) < 27.9  # 99.9 % of chi-square with 9 degrees


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


LAWS = [
    ({}, uniform_law(), lambda t: t),
    ({"law": "logit_normal"}, logit_normal_law(), lambda t: normal_cdf(torch.logit(t.double()))),
    (
        {"law": "logit_normal", "law_shift": 3.0},
        shifted_law(logit_normal_law(), 3.0),
        lambda t: normal_cdf(torch.logit(t.double() / (3 - 2 * t.double()))),
    ),
]


@pytest.mark.parametrize(("options", "law", "cdf"), LAWS, ids=["uniform", "logit_normal", "shifted"])
def test_strata_of_a_law(options: dict, law: object, cdf: object) -> None:
    """Through the cumulative distribution, t lies once in each of n equal strata, uniformly inside."""
    elbo, adapter = Elbo(n_pairs=5, time_sampler="stratified", **options), Tiny()
    exp = experience(adapter, size=2, groups=1)
    u = torch.stack([cdf(elbo.times(replace(exp, iteration=k), SEED)[:, 0]) for k in range(800)])
    inside = 5 * u - torch.arange(5)
    assert inside.min() > -1e-4
    assert inside.max() < 1 + 1e-4
    assert chi_square(inside.clamp(0, 1).flatten()) < 27.9
    direct = torch.stack([cdf(law.icdf(stratified_uniform(5, generator(k, "law")))) for k in range(200)])
    assert ((5 * direct - torch.arange(5)).sub(0.5).abs() < 0.5 + 1e-4).all()


def test_strata_leave_no_room_for_independent_draws() -> None:
    """The same check fails for independent times, so it can fail at all."""
    elbo, adapter = Elbo(n_pairs=5, time_sampler="independent"), Tiny()
    t = torch.stack([elbo.times(experience(adapter, iteration=k), SEED)[:, 0] for k in range(20)])
    assert ((5 * t.sort(dim=1).values - torch.arange(5) - 0.5).abs() > 0.5).any()


# ---- 6. clipping, and 7. the soft clip ----


@pytest.mark.parametrize("ratio", ["mean", "pair"])
@pytest.mark.parametrize(("advantage", "shift", "alive"), [
    (1.0, 0.05, False), (1.0, -0.05, True), (-1.0, -0.05, False), (-1.0, 0.05, True), (1.0, 0.005, True),
    (-1.0, -0.005, True), (0.0, 0.0, False),
])  # fmt: skip
def test_clip_gradient(ratio: str, advantage: float, shift: float, alive: bool) -> None:
    """Beyond the range on the gaining side the gradient is exactly zero, elsewhere that of rho A."""
    adapter = Tiny()
    elbo = Elbo(ratio=ratio)
    exp = with_advantage(experience(adapter), advantage)
    now = elbo.evaluate(adapter, exp, SEED)
    exp = replace(exp, old={"x": now["x"] - shift})
    stats = run(adapter, Algorithm(elbo, clip=2e-2, updates=2), exp)
    grad = adapter.gradient()
    free = run(adapter, Algorithm(elbo, updates=2), exp)
    torch.testing.assert_close(free["ratio/x"], torch.full((len(exp),), math.exp(shift)), rtol=1e-5, atol=0)
    if alive:
        assert_same(grad, adapter.gradient(), rtol=1e-6)
        assert grad.abs().max() > 0
    else:
        assert torch.equal(grad, torch.zeros_like(grad))
    clipped_share = 1.0 if not alive and advantage else 0.0
    torch.testing.assert_close(stats["clipfrac/x"], torch.full((len(exp),), clipped_share))


@given(st.floats(-0.5, 0.5).filter(lambda x: abs(x) > 1e-6), st.floats(-5, 5), st.sampled_from([None, 1e-3, 1e-2, 0.2]))
def test_slope_is_the_derivative(log_ratio: float, advantage: float, clip: float | None) -> None:
    lr, a = torch.tensor([log_ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    rho = math.exp(log_ratio)
    gone = clip is not None and ((advantage > 0 and rho > 1 + clip) or (advantage < 0 and rho < 1 - clip))
    expected = 0.0 if gone else rho * advantage
    assert float(slope(lambda x, y: clipped(x, y, clip), lr, a)) == pytest.approx(expected, rel=1e-12)
    lower = rho * advantage if clip is None else min(rho * advantage, min(max(rho, 1 - clip), 1 + clip) * advantage)
    assert float(clipped(lr, a, clip)) == pytest.approx(lower, rel=1e-12)


def test_slope_at_ratio_one_is_the_advantage() -> None:
    a = torch.tensor([2.0, -3.0, 0.0])
    for clip in (None, 1e-2):
        assert torch.equal(slope(lambda x, y, c=clip: clipped(x, y, c), torch.zeros(3), a), a)


# ---- 8. micro-batches and the two passes ----


def one_graph(adapter: Tiny, algorithm: Algorithm, exp: Experience, snapshots: object) -> Tensor:
    """The objective written out for a rectified flow with velocity output, all pairs in one graph."""
    elbo, f, n = algorithm.elbo, exp.clean["x"], len(exp)
    acted = f.acted.unsqueeze(-1)
    inputs, others = [], []
    for j, t in enumerate(elbo.times(exp, SEED)):
        eps, t_ = elbo.noise(adapter, exp, j, SEED)["x"], t.reshape(-1, *(1,) * (f.value.ndim - 1))
        z = torch.where(acted, (1 - t_) * f.value + t_ * eps, f.value)
        inputs.append((z, t, t_, eps))
        row = {}
        for r in algorithm.regularisers:
            with torch.no_grad(), snapshots.use(r.to):
                row[r.to] = adapter.predict({"x": Field(z, f.valid, f.acted)}, t, exp.cond)["x"]
        others.append(row)

    def mean(x: Tensor) -> Tensor:
        return (x * acted).flatten(1).sum(1) / (f.acted.flatten(1).sum(1) * adapter.channels)

    def views(v: Tensor, z: Tensor, t_: Tensor) -> dict[str, Tensor]:
        return {"x0": z - t_ * v, "velocity": v, "eps": z + (1 - t_) * v}

    surrogate, penalty = [], 0.0
    for (z, t, t_, eps), row in zip(inputs, others, strict=True):
        v = views(adapter.predict({"x": Field(z, f.valid, f.acted)}, t, exp.cond)["x"], z, t_)
        truth = {"x0": f.value, "velocity": eps - f.value, "eps": eps}[elbo.space]
        loss = mean((v[elbo.space] - truth) ** 2)
        if elbo.normalize:
            loss = loss / mean((v[elbo.space] - truth).abs()).detach().clamp(min=elbo.floor)
        surrogate.append(-loss)
        for r in algorithm.regularisers:
            d = v[r.space] - views(row[r.to], z, t_)[r.space]
            penalty = penalty + r.weight * mean(d**2).sum() / len(inputs)
    new = torch.stack(surrogate)
    old = new.detach() if exp.old is None else exp.old["x"]
    log_ratio = new - old if elbo.ratio == "pair" else (new.mean(0) - old.mean(0))[None]
    rho, a = log_ratio.exp(), exp.advantage["x"]
    value = rho * a
    if algorithm.clip is not None:
        value = torch.minimum(value, rho.clamp(1 - algorithm.clip, 1 + algorithm.clip) * a)
    return (-value.mean(0).sum() + penalty) / n


def assert_same(a: Tensor, b: Tensor, rtol: float = 1e-7) -> None:
    assert (a - b).abs().max() <= rtol * b.abs().max(), f"{float((a - b).abs().max() / b.abs().max()):.2e}"


REGULARISERS = {
    "none": (),
    "old": (Regulariser("old", 0.3),),
    "ref": (Regulariser("ref", 0.7, "velocity"),),
    "both": (Regulariser("old", 0.3), Regulariser("ref", 0.2, "eps")),
}


CONTROLS = [
    (1, None, "none"), (1, None, "ref"),  # with one update the others never bind and are refused
    *((2, clip, regulariser) for clip in (None, 3e-3) for regulariser in REGULARISERS),
]  # fmt: skip


@pytest.mark.parametrize(("updates", "clip", "regulariser"), CONTROLS)
@pytest.mark.parametrize("ratio", ["mean", "pair"])
@pytest.mark.parametrize("share", SHARING)
def test_two_passes_equal_one_graph(share: str, ratio: str, updates: int, clip: float | None, regulariser: str) -> None:
    """Pair by pair, micro-batch by micro-batch (across group borders), the gradient is that of the whole objective."""
    for space, normalize in itertools.product(SPACES, [True, False]):
        elbo = Elbo(n_pairs=2, share=share, ratio=ratio, space=space, normalize=normalize)
        algorithm = Algorithm(elbo, clip=clip, regularisers=REGULARISERS[regulariser], updates=updates)
        # Sharing across the batch needs equal geometry; everything else is tried on ragged, partly given samples.
        adapter = Tiny("tokens" if share == "batch" else "ragged", dtype=torch.float64, given=share != "batch")
        exp, snapshots = moved(adapter, elbo, 0.02)
        if updates == 1:
            exp = replace(exp, old=None)
        one_graph(adapter, algorithm, exp, snapshots).backward()
        expected = adapter.gradient()
        assert expected.abs().max() > 0
        for part in exp.micro_batches(4):
            accumulate(adapter, algorithm, part, snapshots, SEED, n_total=len(exp))
        assert_same(adapter.gradient(), expected)


def test_the_cases_above_clip_some_and_not_others() -> None:
    adapter = Tiny("ragged", dtype=torch.float64, given=1)
    exp, snapshots = moved(adapter, Elbo(n_pairs=2), 0.02)
    stats = run(adapter, Algorithm(Elbo(n_pairs=2), clip=3e-3, updates=2), exp, snapshots)
    assert 0 < stats["clipfrac/x"].mean() < 1


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_micro_batch(shape: str, size: int) -> None:
    adapter, elbo = Tiny(shape, dtype=torch.float64), Elbo()
    algorithm = Algorithm(elbo, clip=1e-2, regularisers=REGULARISERS["both"], updates=2)
    exp, snapshots = moved(adapter, elbo)
    one_graph(adapter, algorithm, exp, snapshots).backward()
    expected = adapter.gradient()
    total = 0.0
    for part in exp.micro_batches(size):
        stats = accumulate(adapter, algorithm, part, snapshots, SEED, n_total=len(exp))
        penalty = sum(r.weight * stats[f"regulariser/{r.name}"] for r in algorithm.regularisers)
        total += float((stats["loss"] + penalty).sum()) / len(exp)
    assert_same(adapter.gradient(), expected)
    assert total == pytest.approx(one_graph(adapter, algorithm, exp, snapshots).item(), rel=1e-6)


def peak_saved(algorithm: Algorithm, *, single_graph: bool = False, size: int = 3) -> int:
    """The largest number of elements that autograd holds for backward at any moment."""
    adapter, alive, peak = Tiny(), [0], [0]
    exp, snapshots = moved(adapter, algorithm.elbo, groups=1, size=size)
    if algorithm.on_policy:
        exp = replace(exp, old=None)

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive[0] += tensor.numel()
            peak[0] = max(peak[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= self.tensor.numel()

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        if single_graph:
            one_graph(adapter, algorithm, exp, snapshots).backward()
        else:
            for part in exp.micro_batches(3):
                accumulate(adapter, algorithm, part, snapshots, SEED, n_total=len(exp))
    assert alive[0] == 0
    return peak[0]


@pytest.mark.parametrize("ratio", ["mean", "pair"])
@pytest.mark.parametrize("updates", [1, 2])
def test_memory_does_not_grow(updates: int, ratio: str) -> None:
    def algorithm(n: int) -> Algorithm:
        return Algorithm(Elbo(n_pairs=n, ratio=ratio), clip=1e-2 if updates > 1 else None, updates=updates)

    assert peak_saved(algorithm(8)) == peak_saved(algorithm(1))
    assert peak_saved(algorithm(2), size=12) == peak_saved(algorithm(2), size=3)
    assert peak_saved(algorithm(8), single_graph=True) > 4 * peak_saved(algorithm(8))


@pytest.mark.parametrize(("ratio", "updates", "regularisers", "evaluations", "with_grad"), [
    ("mean", 1, "none", 1, 1),  # fully on-policy: one forward a pair, nothing else
    ("pair", 1, "none", 1, 1),
    ("mean", 1, "ref", 2, 1),
    ("mean", 2, "none", 2, 1),
    ("pair", 2, "none", 1, 1),
    ("mean", 2, "both", 4, 1),
])  # fmt: skip
def test_evaluations(ratio: str, updates: int, regularisers: str, evaluations: int, with_grad: int) -> None:
    adapter, elbo = Tiny(), Elbo(ratio=ratio)
    exp = experience(adapter)
    if updates > 1:
        exp = replace(exp, old=elbo.evaluate(adapter, exp, SEED))
    adapter.counter.evaluations, adapter.calls = 0, []
    algorithm = Algorithm(elbo, regularisers=REGULARISERS[regularisers], updates=updates)
    for part in exp.micro_batches(4):
        accumulate(adapter, algorithm, part, adapter.snapshots("old", "ref"), SEED, n_total=len(exp))
    assert adapter.counter.evaluations == evaluations * elbo.n_pairs * len(exp)
    assert sum(len(call.t) for call in adapter.calls if call.grad) == with_grad * elbo.n_pairs * len(exp)


# ---- permutations and masks ----


@given(st.permutations(range(6)))
def test_permutation_equivariance(order: list[int]) -> None:
    adapter, elbo = Tiny("ragged", dtype=torch.float64), Elbo(n_pairs=2)
    algorithm = Algorithm(elbo, clip=1e-2, regularisers=REGULARISERS["old"], updates=2)
    exp, snapshots = moved(adapter, elbo)
    stats = run(adapter, algorithm, exp, snapshots)
    grad, idx = adapter.gradient(), torch.tensor(order)
    permuted = run(adapter, algorithm, exp.index(idx), snapshots)
    assert_same(adapter.gradient(), grad)
    for key, value in stats.items():
        torch.testing.assert_close(permuted[key], value[idx])


def test_padding_has_no_effect() -> None:
    """Garbage in padded sites, and more of them, change nothing."""
    adapter, elbo = Tiny("ragged", dtype=torch.float64), Elbo()
    algorithm = Algorithm(elbo, clip=1e-2, regularisers=REGULARISERS["old"], updates=2)
    exp, snapshots = moved(adapter, elbo)
    stats, grad = run(adapter, algorithm, exp, snapshots), None
    grad = adapter.gradient()
    f = exp.clean["x"]
    value = torch.where(f.valid.unsqueeze(-1), f.value, 1e3)
    wide = torch.cat([value, torch.full((len(value), 2, value.shape[2]), -1e3)], dim=1)
    more = torch.zeros(len(value), 2, dtype=torch.bool)
    padded = Field(wide, torch.cat([f.valid, more], dim=1), torch.cat([f.acted, more], dim=1))
    again = run(adapter, algorithm, replace(exp, clean={"x": padded}), snapshots)
    assert_same(adapter.gradient(), grad, rtol=1e-12)
    for key in stats:
        torch.testing.assert_close(again[key], stats[key], rtol=1e-12, atol=1e-15)


def test_given_sites_stay_clean_and_are_not_scored() -> None:
    adapter, elbo = Tiny("ragged", given=2), Elbo()
    exp = experience(adapter, lengths=[5, 5])
    run(adapter, Algorithm(elbo), exp)
    for call in adapter.calls:
        assert torch.equal(call.value[:, :2], exp.clean["x"].value[:, :2])
        assert not torch.equal(call.value[:, 2:], exp.clean["x"].value[:, 2:])
    out = {"x": torch.zeros_like(exp.clean["x"].value).requires_grad_()}
    t, noise = elbo.times(exp, SEED)[0], elbo.noise(adapter, exp, 0, SEED)
    noisy = adapter.perturb(exp.clean, noise, t, exp.cond)
    elbo.losses(adapter, exp, noisy, noise, t, out)["x"].sum().backward()
    assert torch.equal(out["x"].grad[:, :2], torch.zeros_like(out["x"].grad[:, :2]))
    assert (out["x"].grad[:, 2:] != 0).any()


def test_longer_samples_do_not_weigh_more() -> None:
    """A sample repeated to twice its length has the same loss: mean, never sum."""
    adapter = Tiny("ragged", dtype=torch.float64)
    exp = experience(adapter, groups=1, size=1, lengths=[3])
    f, t, elbo = exp.clean["x"], torch.tensor([0.4]), Elbo()
    noise = adapter.draw(exp.cond, [torch.Generator().manual_seed(0)])
    out = {"x": torch.randn(1, 3, 3, dtype=torch.float64)}

    def loss(times: int) -> Tensor:
        clean = {"x": Field(*(torch.cat([x] * times, 1) for x in (f.value, f.valid, f.acted)))}
        wide = {"x": torch.cat([noise["x"]] * times, 1)}
        noisy = adapter.perturb(clean, wide, t, exp.cond)
        network = {"x": torch.cat([out["x"]] * times, 1)}
        return elbo.losses(adapter, replace(exp, clean=clean), noisy, wide, t, network)["x"]

    torch.testing.assert_close(loss(2), loss(1), rtol=1e-12, atol=0)


def test_a_perfect_network_has_loss_zero_and_finite_gradient() -> None:
    adapter, elbo = Tiny(prediction="x0"), Elbo()
    exp = experience(adapter)
    t, noise = elbo.times(exp, SEED)[0], elbo.noise(adapter, exp, 0, SEED)
    out = {"x": exp.clean["x"].value.clone().requires_grad_()}
    loss = elbo.losses(adapter, exp, adapter.perturb(exp.clean, noise, t, exp.cond), noise, t, out)["x"]
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(len(exp)))
    assert torch.equal(out["x"].grad, torch.zeros_like(out["x"].grad))


# ---- 9. the statistics that explain the method ----


def test_variance_reduction_lowers_the_spread_within_groups() -> None:
    adapter = Tiny()

    def spread(elbo: Elbo) -> float:
        values = []
        for k in range(8):
            exp = experience(adapter, size=8, iteration=k, seed=k)
            values.append(variation(elbo.evaluate(adapter, exp, SEED)["x"].mean(0), exp.group)["cv_within"])
        return sum(values) / len(values)

    naive = Elbo(share="none", time_sampler="independent", normalize=False)
    assert spread(Elbo()) < spread(replace(Elbo(), share="none")) < spread(naive)


def test_variation() -> None:
    x, group = torch.tensor([-1.0, -3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    out = variation(x, group)
    assert out["cv_within"] == pytest.approx((0.5 + 0) / 2)
    assert out["cv"] == pytest.approx(float(x.std(correction=0) / 1.5))


# ---- what is refused ----


@pytest.mark.parametrize(("options", "message"), [
    ({"clip": 1e-2}, "updates=2"), ({"regularisers": (Regulariser("old", 0.3),)}, "updates=2"),
    ({"clip": 0.0, "updates": 2}, "positive"), ({"updates": 0}, "1 or more"),
    ({"regularisers": (Regulariser("ema", 0.1),)}, "ema_decay"),
])  # fmt: skip
def test_illegal_algorithms(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Algorithm(**options)


@pytest.mark.parametrize("options", [
    {"share": "group"}, {"time_sampler": "strata"}, {"space": "x"}, {"ratio": "sum"}, {"n_pairs": 0}, {"law": "beta"},
])  # fmt: skip
def test_illegal_surrogates(options: dict) -> None:
    with pytest.raises(UserError, match=f"surrogate.{next(iter(options))}"):
        Elbo(**options)


def test_more_pairs_than_steps_is_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="n_pairs <= 3"):
        Elbo(n_pairs=4).check(Tiny().streams, n_steps=3)
    Elbo(n_pairs=4, time_sampler="stratified").check(Tiny().streams, n_steps=3)
