"""The conformance suite: what every adapter must satisfy. A new adapter's test is one call of :func:`check_adapter`.

Nothing here knows an adapter: what is compared follows from the declared streams, their processes and the geometry.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.adapter import Adapter, box, hold
from core.algorithm import Algorithm
from core.cache import ConditioningCache
from core.processes import Gaussian
from core.rng import generator
from core.samplers import euler
from core.snapshots import Snapshots
from core.streams import StreamSpec
from core.surrogate import Elbo, Experience
from core.types import Conditioning, Noise, Predictions, Request, State
from core.update import accumulate

SEED = 20260423
MEMBERS = 2
TIMES = (0.2, 0.5, 0.85)


@dataclass(frozen=True)
class Check:
    """One property: held, or the sentence that says what is wrong."""

    name: str
    ok: bool
    message: str = ""


@dataclass(frozen=True)
class Case:
    """What the checks work on: a short rollout of MEMBERS samples for each request, and real data where given."""

    adapter: Adapter
    requests: Sequence[Request]
    atol: float
    prior: State
    exp: Experience
    elbo: Elbo
    data: State | None = None

    @property
    def streams(self) -> list[StreamSpec]:
        return [spec for spec in self.adapter.streams if spec.trainable]

    def expect(self, condition: bool | Tensor, sentence: str, stream: str | None = None) -> None:
        _expect(self.adapter, condition, sentence, stream)

    def noise(self, pair: int = 0, exp: Experience | None = None) -> Noise:
        return self.elbo.noise(self.adapter, exp or self.exp, pair, SEED)

    def losses(self, exp: Experience | None = None) -> dict[str, Tensor]:
        """Denoising losses at fixed times, stream -> [pairs, B], with gradient where it is enabled."""
        exp = exp or self.exp
        rows = []
        for pair, time in enumerate(TIMES):
            t = torch.full((len(exp),), time, device=self.adapter.device)
            noise = self.noise(pair, exp)
            noisy = self.adapter.perturb(exp.clean, noise, t, exp.cond)
            rows.append(self.elbo.losses(self.adapter, exp, noisy, noise, t, self.adapter.forward(noisy, t, exp.cond)))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def close(self, a: Tensor, b: Tensor) -> bool:
        return bool(torch.isfinite(a).all()) and bool(((a - b).abs() <= self.atol * (1 + b.abs())).all())


def _expect(adapter: Adapter, condition: bool | Tensor, sentence: str, stream: str | None = None) -> None:
    if not bool(condition):
        where = f"{type(adapter).__name__}, stream '{stream}'" if stream else type(adapter).__name__
        raise AssertionError(f"{where}: {sentence}")


def check_adapter(
    adapter: Adapter, requests: Sequence[Request], *, data: State | None = None, atol: float = 1e-4
) -> None:
    """Raise AssertionError with one sentence for each property the adapter breaks.

    requests: two or more small ones, of different geometry where the modality allows it, otherwise padding is not
    tested. data: real clean latents, one row a request; with them (and trained weights) the sign and the time
    convention of ``predict`` are tested too, which no other check can see. atol: relative to 1 + |value|; batched
    float32 products sum in another order at another batch size, so a large network may need more.
    """
    failed = [check.message for check in conformance(adapter, requests, data=data, atol=atol) if not check.ok]
    if failed:
        raise AssertionError("\n".join(failed))


def conformance(
    adapter: Adapter, requests: Sequence[Request], *, data: State | None = None, atol: float = 1e-4
) -> list[Check]:
    """Every check with its outcome; the likely causes come before their consequences."""
    with _left_as_found(adapter):
        try:
            case = _prepare(adapter, requests, data, atol)
        except Exception as error:
            return [_failed(adapter, "setup", error)]
        out = [Check("setup", True)]
        for check in CHECKS:
            name = check.__name__.removeprefix("_check_")
            try:
                check(case)
                out.append(Check(name, True))
            except Exception as error:
                out.append(_failed(adapter, name, error))
        return out


def _failed(adapter: Adapter, name: str, error: Exception) -> Check:
    if isinstance(error, AssertionError):
        return Check(name, False, f"[{name}] {error}")
    who = type(adapter).__name__
    return Check(name, False, f"[{name}] {who}: raised {type(error).__name__} during this check: {error}")


@contextmanager
def _left_as_found(adapter: Adapter) -> Iterator[None]:
    """Modes, requires_grad, gradients and torch's random state come back; frozen networks are freed meanwhile."""
    modules = [m for root in adapter.modules().values() for m in root.modules()]
    parameters = _parameters(adapter)
    modes = [m.training for m in modules]
    before = [(p.requires_grad, p.grad) for p in parameters.values()]
    random = torch.get_rng_state()
    try:
        for module in adapter.modules().values():
            module.eval()
        free_all = not any(p.requires_grad for p in parameters.values())
        for p in parameters.values():
            p.grad = None
            if free_all:
                p.requires_grad_(p.is_floating_point())
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for p, (requires_grad, grad) in zip(parameters.values(), before, strict=True):
            p.requires_grad_(requires_grad)
            p.grad = grad
        torch.set_rng_state(random)


def _parameters(adapter: Adapter) -> dict[str, nn.Parameter]:
    return {f"{m}.{k}": p for m, module in adapter.modules().items() for k, p in module.named_parameters()}


def _prepare(adapter: Adapter, requests: Sequence[Request], data: State | None, atol: float) -> Case:
    def expect(condition: bool | Tensor, sentence: str, stream: str | None = None) -> None:
        _expect(adapter, condition, sentence, stream)

    expect(len(requests) >= 2, "give check_adapter two requests or more; batching cannot be tested with one")
    names = [spec.name for spec in adapter.streams]
    expect(len(names) > 0 and len(set(names)) == len(names), f"stream names must be distinct, they are {names}")
    expect(any(spec.trainable for spec in adapter.streams), "no stream is trainable; set trainable=True on one")
    expect(len(adapter.modules()) > 0, "modules() is empty, so nothing can be trained; return the network by name")
    encoded = adapter.encode(requests)
    expect(
        len(encoded) == len(requests), f"encode gave {len(encoded)} rows for {len(requests)} requests; give one each"
    )
    for request, geometry in zip(requests, encoded.geometry, strict=True):
        expect(
            dict(geometry) == dict(request.geometry),
            f"encode turned the geometry {dict(request.geometry)} into {dict(geometry)}; the cache keeps the request's "
            "own, so pass it on unchanged and derive the rest in layout",
        )
    group = torch.arange(len(requests)).repeat_interleave(MEMBERS)
    member = torch.arange(MEMBERS).repeat(len(requests))
    cond = encoded.to(adapter.device).index(group)
    noise = adapter.draw(cond, _rollout_generators(group, member))
    prior = adapter.prior(noise, cond)
    for spec in adapter.streams:
        f = prior[spec.name]
        axes = 1 + len(spec.site_axes)
        expect(
            f.valid.ndim == axes and f.value.ndim == axes + len(spec.event_axes),
            f"site_axes {spec.site_axes} and event_axes {spec.event_axes} do not fit a value of shape "
            f"{tuple(f.value.shape)} with sites {tuple(f.valid.shape[1:])}; correct the axes or layout",
            spec.name,
        )
        expect(
            (f.acted <= f.valid).all(), "acted marks padded sites; layout's acted must lie inside its sites", spec.name
        )
        expect(f.acted.flatten(1).any(1).all(), "a sample has no acted site, so there is nothing to train", spec.name)

    def predict(noisy: State, t: Tensor) -> Predictions:
        return adapter.forward(noisy, t, cond)

    with torch.no_grad():
        grid = adapter.grid(4, cond)
        clean = euler(predict, prior, noise, grid, adapter.streams)
    for spec in adapter.streams:
        finite = torch.isfinite(clean[spec.name].value.double()).all()
        expect(
            finite,
            "four Euler steps give NaN or infinity; predict divides by zero, or the grid starts at a time where "
            f"'{spec.prediction}' says nothing of the data (eps or score at pure noise: start the grid below 1)",
            spec.name,
        )
    elbo = Elbo(n_pairs=2, time_sampler="stratified", normalize=False)
    elbo.check(adapter.streams, len(grid) - 1)
    signs = torch.where(member % 2 == 0, 1.0, -1.0)
    advantage = {spec.name: signs for spec in adapter.streams if spec.trainable}
    exp = Experience(clean, cond, group, member, grid, 0, advantage)
    return Case(adapter, requests, atol, prior, exp, elbo, data)


def _rollout_generators(group: Tensor, member: Tensor) -> list[torch.Generator]:
    pairs = zip(group.tolist(), member.tolist(), strict=True)
    return [generator(SEED, "rollout", g, m) for g, m in pairs]


def _rows(mask: Tensor, value: Tensor) -> Tensor:
    """value where mask, zero elsewhere; mask [B, *sites]."""
    return hold(mask, value, torch.zeros_like(value))


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _double_state(state: State) -> State:
    return {name: f.with_value(_double(f.value)) for name, f in state.items()}


# ---- the checks, causes before consequences ----------------------------------------------------------------------


def _check_draw(case: Case) -> None:
    """One generator a sample is all that decides its noise."""
    exp, adapter = case.exp, case.adapter
    first = adapter.draw(exp.cond, _rollout_generators(exp.group, exp.member))
    torch.manual_seed(1)
    again = adapter.draw(exp.cond, _rollout_generators(exp.group, exp.member))
    same = torch.tensor([0, 0])
    twins = adapter.draw(exp.cond.index(same), [generator(SEED, "twin"), generator(SEED, "twin")])
    last = torch.tensor([len(exp) - 1])
    alone = adapter.draw(exp.cond.index(last), _rollout_generators(exp.group[last], exp.member[last]))
    for spec in adapter.streams:
        x, valid = first[spec.name], exp.clean[spec.name].valid
        case.expect(
            torch.equal(x, again[spec.name]),
            "draw gives other noise for the same generators; draw from the generators it is given, nothing else",
            spec.name,
        )
        case.expect(
            torch.equal(twins[spec.name][0], twins[spec.name][1]),
            "equal generators give different noise within one batch; use one generator a sample, not one for all",
            spec.name,
        )
        case.expect(
            all(not torch.equal(x[i], x[i + 1]) for i in range(len(x) - 1)),
            "two samples with different generators get the same noise; draw must use each sample's own generator",
            spec.name,
        )
        row = alone[spec.name][0]
        sites = valid[box(len(x) - 1, row.shape[: valid.ndim - 1])]
        case.expect(
            torch.equal(x[box(len(x) - 1, row.shape)][sites], row[sites]),
            "a sample's noise changes with the batch it is drawn in; draw each sample at its own size, then pad",
            spec.name,
        )


def _check_noise_pairing(case: Case) -> None:
    """Surrogate noise: shared inside a group, different between groups and pairs."""
    first, second = case.noise(0), case.noise(1)
    for spec in case.streams:
        x = first[spec.name]
        for g in case.exp.group.unique():
            rows = x[(case.exp.group == g).to(x.device)]
            case.expect(
                torch.equal(rows[:1].expand_as(rows), rows),
                "members of a group see different surrogate noise",
                spec.name,
            )
        case.expect(
            all(not torch.equal(x[i], x[i + MEMBERS]) for i in range(0, len(x) - MEMBERS, MEMBERS)),
            "two groups see the same surrogate noise; draw must use the generators it is given",
            spec.name,
        )
        case.expect(not torch.equal(x, second[spec.name]), "two surrogate pairs see the same noise", spec.name)


def _check_ends(case: Case) -> None:
    """Data at t = 0, the prior at t = 1, the given sites in between."""
    exp, adapter = case.exp, case.adapter
    noise = case.noise()
    start = adapter.perturb(exp.clean, noise, torch.zeros(len(exp), device=adapter.device), exp.cond)
    end = adapter.perturb(exp.clean, noise, torch.ones(len(exp), device=adapter.device), exp.cond)
    prior = adapter.prior(case.noise(exp=exp), exp.cond)
    for spec in adapter.streams:
        clean = exp.clean[spec.name]
        gap = spec.process.difference(start[spec.name].value, clean.value).abs()
        case.expect(
            (gap <= case.atol * (1 + clean.value.abs())).all(),
            f"perturb at t = 0 is not the clean value (off by {float(gap.max()):.3g}); canonical time has data at "
            "t = 0, map the model's own time inside predict",
            spec.name,
        )
        slack = torch.zeros_like(gap, dtype=torch.float32)
        if isinstance(spec.process, Gaussian):  # some paths keep a little of the data at t = 1
            slack = spec.process.coefficients(torch.ones((), device=adapter.device)).a.abs() * clean.value.abs()
        expected = prior[spec.name].value
        gap = _rows(clean.acted, spec.process.difference(end[spec.name].value, expected).abs())
        case.expect(
            (gap <= slack + case.atol * (1 + expected.abs())).all(),
            f"perturb at t = 1 is not the prior of the same noise (off by {float(gap.max()):.3g}); canonical time "
            "has noise at t = 1, or prior and perturb scale the noise differently",
            spec.name,
        )


def _check_oracle(case: Case) -> None:
    """A perfect network has no loss and takes any noisy value home in one step."""
    adapter, clean = case.adapter, _double_state(case.exp.clean)
    exp = replace(case.exp, clean=clean)
    for pair, time in enumerate(TIMES):
        noise = {name: _double(x) for name, x in case.noise(pair).items()}
        t = torch.full((len(exp),), time, dtype=torch.float64, device=adapter.device)
        noisy = adapter.perturb(clean, noise, t, exp.cond)

        def perfect(state: State, now: Tensor, noise: Noise = noise) -> Predictions:
            return {
                s.name: s.process.target(clean[s.name].value, noise[s.name], now, s.prediction) for s in adapter.streams
            }

        losses = case.elbo.losses(adapter, exp, noisy, noise, t, perfect(noisy, t))
        home = euler(perfect, noisy, noise, torch.tensor([time, 0.0], dtype=torch.float64), adapter.streams)
        for spec in adapter.streams:
            if spec.trainable:
                loss = losses[spec.name]
                case.expect(
                    (loss.abs() <= case.atol * (1 + clean[spec.name].value.double().square().max())).all(),
                    f"a perfect prediction at t = {time} has loss {float(loss.abs().max()):.3g} instead of 0; perturb "
                    f"does not follow the declared process {type(spec.process).__name__}",
                    spec.name,
                )
            f = clean[spec.name]
            gap = _rows(f.acted, spec.process.difference(home[spec.name].value, f.value).abs())
            case.expect(
                (gap <= case.atol * (1 + f.value.abs().max())).all(),
                f"one step from t = {time} to 0 with a perfect prediction misses the clean value by "
                f"{float(gap.max()):.3g}; perturb and the declared process disagree",
                spec.name,
            )


def _check_conversion(case: Case) -> None:
    """Declared prediction -> (x0, eps) -> declared prediction, in float64."""
    clean = _double_state(case.exp.clean)
    noise = {name: _double(x) for name, x in case.noise().items()}
    for time in TIMES:
        t = torch.full((len(case.exp),), time, dtype=torch.float64, device=case.adapter.device)
        noisy = case.adapter.perturb(clean, noise, t, case.exp.cond)
        for spec in case.adapter.streams:
            process = spec.process
            if not isinstance(process, Gaussian):
                continue
            f = clean[spec.name]
            target = process.target(f.value, noise[spec.name], t, spec.prediction)
            x0, eps = process.split(noisy[spec.name].value, target, t, spec.prediction)
            back = process.combine(x0, eps, t, spec.prediction)
            for what, got, expected in (
                ("x0", x0, f.value),
                ("eps", eps, noise[spec.name]),
                (spec.prediction, back, target),
            ):
                gap = _rows(f.acted, (got - expected).abs())
                case.expect(
                    (gap <= 1e-6 * (1 + expected.abs().max())).all(),
                    f"{spec.prediction} at t = {time} converts to a {what} that is off by {float(gap.max()):.3g}; "
                    "perturb does not follow the process's coefficients, or the process's table is wrong",
                    spec.name,
                )


def _check_prediction(case: Case) -> None:
    """Shapes, finiteness, and no change of the inputs."""
    exp, adapter = case.exp, case.adapter
    t = torch.full((len(exp),), 0.5, device=adapter.device)
    noise = case.noise()
    noisy = adapter.perturb(exp.clean, noise, t, exp.cond)
    kept = {name: f.value.clone() for name, f in noisy.items()}
    branches = ("cond", "null") if adapter.guidance.mode == "cfg" else ("cond",)
    for branch in branches:
        with torch.no_grad():
            out = adapter.forward(noisy, t, exp.cond, branch)
        for spec in adapter.streams:
            expected = spec.process.target(exp.clean[spec.name].value, noise[spec.name], t, spec.prediction).shape
            case.expect(
                out[spec.name].shape == expected,
                f"predict (branch {branch}) returns shape {tuple(out[spec.name].shape)}, a {spec.prediction} has "
                f"{tuple(expected)}; crop or reshape the network's output",
                spec.name,
            )
            sites = exp.clean[spec.name].valid
            case.expect(
                torch.isfinite(_rows(sites, out[spec.name])).all(),
                f"predict (branch {branch}) gives NaN or infinity on real sites",
                spec.name,
            )
            case.expect(
                torch.equal(noisy[spec.name].value, kept[spec.name]),
                "predict changes the noisy state in place; clone before writing",
                spec.name,
            )


def _check_ratio_one(case: Case) -> None:
    """The surrogate is a function: twice the same, bit for bit, with train() on."""
    modules = case.adapter.modules().values()
    try:
        for module in modules:
            module.train()
        with torch.no_grad():
            first, second = case.losses(), case.losses()
        with_gradient = case.losses()
    finally:
        for module in modules:
            module.eval()
    for spec in case.streams:
        case.expect(
            torch.equal(first[spec.name], second[spec.name]),
            "the same loss computed twice without an update differs, so the ratio is not 1; something in predict is "
            "random in train mode (dropout, condition drop): switch it off",
            spec.name,
        )
        case.expect(
            case.close(with_gradient[spec.name].detach(), first[spec.name]),
            "the loss with gradients on differs from the loss without; predict must not depend on the gradient mode",
            spec.name,
        )


def _check_centre(case: Case) -> None:
    """Zero centre of mass, where declared, of noise, prior, samples, noisy values and targets."""
    exp, adapter = case.exp, case.adapter
    noise = case.noise()
    for spec in adapter.streams:
        if spec.dof != "sites-1":
            continue
        valid = exp.clean[spec.name].valid
        raw = adapter.draw(exp.cond, _rollout_generators(exp.group, exp.member))[spec.name]
        values = {"draw": raw, "prior": case.prior[spec.name].value, "the sampled value": exp.clean[spec.name].value}
        for time in TIMES:
            t = torch.full((len(exp),), time, device=adapter.device)
            values["perturb"] = adapter.perturb(exp.clean, noise, t, exp.cond)[spec.name].value
            values["the target"] = spec.process.target(exp.clean[spec.name].value, noise[spec.name], t, spec.prediction)
            for what, x in values.items():
                gap = _rows(valid, x - spec.project(x, valid)).abs()
                case.expect(
                    (gap <= case.atol * (1 + x.abs().max())).all(),
                    f"{what} has a centre of mass {float(gap.max()):.3g} away from zero although dof is 'sites-1'; "
                    "project it over the valid sites (StreamSpec.project)",
                    spec.name,
                )


def _check_masks(case: Case) -> None:
    """Sites the policy did not produce are kept, and are without effect as targets; produced ones count."""
    exp, adapter = case.exp, case.adapter
    t = torch.full((len(exp),), TIMES[-1], device=adapter.device)
    noise = case.noise()
    noisy = adapter.perturb(exp.clean, noise, t, exp.cond)
    perfect = {
        s.name: s.process.target(exp.clean[s.name].value, noise[s.name], t, s.prediction) for s in adapter.streams
    }
    base = case.elbo.losses(adapter, exp, noisy, noise, t, perfect)
    for spec in adapter.streams:
        f = exp.clean[spec.name]
        given = f.valid & ~f.acted
        for what, x in (("perturb", noisy[spec.name].value), ("prior", case.prior[spec.name].value)):
            case.expect(
                torch.equal(_rows(given, x), _rows(given, f.value)),
                f"{what} changes sites that are not acted; they are given and stay clean at every t",
                spec.name,
            )
        if not spec.trainable:
            continue
        changed = f.value + 1 if f.value.is_floating_point() else torch.where(f.value == 0, 1, 0)
        away = replace(exp, clean=exp.clean | {spec.name: f.with_value(hold(f.acted, f.value, changed))})
        loss = case.elbo.losses(adapter, away, noisy, noise, t, perfect)[spec.name]
        case.expect(
            torch.equal(loss, base[spec.name]), "targets at sites that are not acted change the loss", spec.name
        )
        near = replace(exp, clean=exp.clean | {spec.name: f.with_value(hold(f.acted, changed, f.value))})
        loss = case.elbo.losses(adapter, near, noisy, noise, t, perfect)[spec.name]
        case.expect(
            bool((loss > base[spec.name]).any()), "other targets at acted sites do not change the loss", spec.name
        )


def _alone(case: Case, row: int) -> Experience:
    """One sample as its own batch: encoded by itself and cut to its own size."""
    exp, adapter = case.exp, case.adapter
    idx = torch.tensor([row])
    cond = adapter.encode([case.requests[int(exp.group[row])]]).to(adapter.device)
    clean: State = {}
    for name, layout in adapter.layout(cond).items():
        window = (slice(None), *(slice(0, n) for n in layout.padded))
        f = exp.index(idx).clean[name]
        clean[name] = replace(f, value=f.value[window], valid=f.valid[window], acted=f.acted[window])
    return replace(exp.index(idx), clean=clean, cond=cond)


@torch.no_grad()
def _check_padding(case: Case) -> None:
    """The same sample alone and inside a longer batch."""
    together = case.losses()
    for row in range(0, len(case.exp), MEMBERS):
        alone = case.losses(_alone(case, row))
        for spec in case.streams:
            a, b = together[spec.name][:, row], alone[spec.name][:, 0]
            case.expect(
                case.close(a, b),
                f"sample {row} has loss {b.tolist()} alone and {a.tolist()} inside a batch with longer ones; padded "
                "sites leak into real ones in predict (attention, pooling or normalisation without the valid mask), "
                "or encode depends on the company",
                spec.name,
            )


def _check_batch_order(case: Case) -> None:
    """Permuting the batch permutes the losses; micro-batches give the same losses and the same gradient."""
    exp = case.exp
    with torch.no_grad():
        whole = case.losses()
        order = torch.arange(len(exp) - 1, -1, -1)
        turned = case.losses(exp.index(order))
        parts = [case.losses(part) for part in exp.micro_batches(1)]
    for spec in case.streams:
        case.expect(
            case.close(turned[spec.name], whole[spec.name][:, order.to(whole[spec.name].device)]),
            "reversing the batch does not just reverse the losses; samples influence each other in predict",
            spec.name,
        )
        split = torch.cat([part[spec.name] for part in parts], dim=1)
        case.expect(
            case.close(split, whole[spec.name]),
            "micro-batches give other losses than the whole batch; samples influence each other in predict "
            "(batch normalisation, a mean over the batch)",
            spec.name,
        )
    full, split_up = _gradient(case, [exp]), _gradient(case, exp.micro_batches(MEMBERS + 1))
    size = max((float(g.abs().max()) for g in full.values()), default=0.0)
    for name, g in full.items():
        case.expect(
            bool(((g - split_up[name]).abs() <= 10 * case.atol * (size + 1e-8)).all()),
            f"the gradient of '{name}' depends on how the batch is split; samples influence each other in predict",
        )


def _gradient(case: Case, parts: Sequence[Experience]) -> dict[str, Tensor]:
    """The gradient of one V-GRPO step, by parameter; zeros where none arrived."""
    trainable = {name: p for name, p in _parameters(case.adapter).items() if p.requires_grad}
    snapshots, algorithm = Snapshots(trainable), Algorithm(elbo=replace(case.elbo, normalize=True))
    for p in trainable.values():
        p.grad = None
    for part in parts:
        accumulate(case.adapter, algorithm, part, snapshots, SEED, sum(len(p) for p in parts))
    out = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable.items()}
    for p in trainable.values():
        p.grad = None
    return out


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors whose gradient a backward pass would fill."""
    seen: set[Any] = set()
    stack, found = [loss.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def _check_gradient(case: Case) -> None:
    """Finite, in the listed modules only, and zero without advantages."""
    own = {id(p) for p in _parameters(case.adapter).values()}
    for name, losses in case.losses().items():
        leaves = _leaves(losses.sum())
        case.expect(
            any(id(x) in own for x in leaves),
            "the loss does not reach a parameter of modules(); is the network missing there, or predict detached or "
            "under no_grad?",
            name,
        )
        strangers = [x for x in leaves if id(x) not in own]
        case.expect(
            not strangers,
            f"the loss has a gradient in {len(strangers)} tensor(s) outside modules(), the first of shape "
            f"{tuple(strangers[0].shape) if strangers else ()}; list that network in modules() or freeze it",
            name,
        )
    gradient = _gradient(case, [case.exp])
    for name, g in gradient.items():
        case.expect(torch.isfinite(g).all(), f"the gradient of '{name}' has NaN or infinity")
    case.expect(any(bool((g != 0).any()) for g in gradient.values()), "the gradient is zero everywhere in modules()")
    silent = replace(case.exp, advantage={k: torch.zeros_like(v) for k, v in case.exp.advantage.items()})
    for name, g in _gradient(case, [silent]).items():
        case.expect(not (g != 0).any(), f"'{name}' has a gradient although all advantages are zero")


def _check_stratification(case: Case) -> None:
    """The sampling grid is one, and pairs cover it part by part, never at t = 0."""
    n = 8
    grid = case.adapter.grid(n, case.exp.cond)
    case.expect(
        grid.dtype == torch.float32 and len(grid) == n + 1 and bool((grid[1:] < grid[:-1]).all()),
        f"grid({n}) must be {n + 1} float32 times that fall strictly, it is {grid.tolist()}",
    )
    case.expect(
        bool((grid[-1] == 0).all()) and bool((grid[0] <= 1).all()),
        f"grid({n}) must lie in [0, 1] and end at exactly 0 (data), it is {grid.tolist()}; noise is at t = 1",
    )
    by_row = grid.unsqueeze(1).expand(-1, len(case.exp)) if grid.ndim == 1 else grid
    for iteration in range(4):
        exp = replace(case.exp, grid=grid, iteration=iteration)
        times = Elbo(n_pairs=4, time_sampler="stratified_index").times(exp, SEED)
        low, high = by_row[1::2][:4], by_row[0::2][:4]
        case.expect(
            bool(((times >= low) & (times <= high)).all()) and bool((times > 0).all()),
            "surrogate times do not take one grid point from each quarter",
        )


@torch.no_grad()
def _check_conditioning(case: Case) -> None:
    """encode -> disk -> collate in other company gives the same losses; meta is for rewards only."""
    adapter, requests, exp = case.adapter, list(case.requests), case.exp
    direct = adapter.encode(requests)
    bare = adapter.encode([Request(r.inputs, r.geometry) for r in requests])
    for name, x in direct.tensors.items():
        case.expect(
            x.shape == bare.tensors[name].shape and torch.equal(x, bare.tensors[name]),
            f"encode gives another '{name}' for the same requests without meta; it is random, or it reads meta, which "
            "is for rewards only and not part of the cache's key",
        )
    with tempfile.TemporaryDirectory() as folder:
        cache = ConditioningCache(adapter, Path(folder))
        cache.prepare(requests[::-1], batch=2)
        cache = ConditioningCache(adapter, Path(folder))
        loaded, single = cache.get(requests), [cache.get([r]) for r in requests]
    case.expect(
        {k: x.dtype for k, x in loaded.tensors.items()} == {k: x.dtype for k, x in direct.tensors.items()},
        "conditionings come back from the cache with other names or dtypes",
    )
    for request, cached in zip(requests, single, strict=True):
        fresh = adapter.encode([request]).to(adapter.device)
        priors = [adapter.prior(adapter.draw(c, [generator(SEED, "cached")]), c) for c in (fresh, cached)]
        for spec in adapter.streams:
            one, other = (prior[spec.name] for prior in priors)
            gap = spec.process.difference(one.value, other.value).abs().double()
            case.expect(
                bool((gap <= case.atol * (1 + one.value.abs())).all()) and torch.equal(one.acted, other.acted),
                f"the prior of {dict(request.geometry)} differs between a fresh encoding and a cached one; layout must "
                "cut tensors that were padded by what they were encoded with",
                spec.name,
            )
    a, b = case.losses(), case.losses(replace(exp, cond=loaded.index(exp.group)))
    for spec in case.streams:
        case.expect(
            case.close(b[spec.name], a[spec.name]),
            "losses differ between a fresh encoding and one that went through the cache in other company; encode pads "
            "or normalises by what it is batched with (store a mask or a length beside padded tensors)",
            spec.name,
        )


def _parts_finite(parts: Mapping[str, Any]) -> bool:
    arrays = [np.asarray(x) for x in parts.values() if isinstance(x, (Tensor, np.ndarray, float))]
    return all(bool(np.isfinite(x).all()) for x in arrays if np.issubdtype(x.dtype, np.floating))


def _shapes(parts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in parts.items() if isinstance(x, (Tensor, np.ndarray))}


@torch.no_grad()
def _check_decode(case: Case) -> None:
    """A good batch decodes; a bad sample is Sample(ok=False), never an exception, and leaves the others alone."""
    exp, adapter = case.exp, case.adapter
    good = adapter.decode(exp.clean, exp.cond)
    case.expect(len(good) == len(exp), f"decode gave {len(good)} samples for a batch of {len(exp)}")
    for row in range(0, len(exp), MEMBERS):
        lone = _alone(case, row)
        shapes, expected = _shapes(good[row].parts), _shapes(adapter.decode(lone.clean, lone.cond)[0].parts)
        case.expect(
            shapes == expected or not good[row].ok,
            f"sample {row} decodes to {shapes} in a batch and {expected} alone; cut padding off in decode",
        )
    for spec in adapter.streams:
        f = exp.clean[spec.name]
        first = f.acted & (torch.arange(len(exp), device=f.acted.device) == 0).reshape(-1, *(1,) * (f.acted.ndim - 1))
        if f.value.is_floating_point():
            bad = {"NaN": float("nan"), "infinity": float("inf"), "-infinity": float("-inf")}
            wild = {"1e30": 1e30, "-1e30": -1e30, "0": 0.0}
        else:
            bad = {"an unfinished value": int(case.prior[spec.name].value[f.acted][0]), "-1": -1}
            wild = {"the class 0": 0}
        for what, value in (bad | wild).items():
            spoilt = hold(first, torch.full_like(f.value, value), f.value)
            try:
                samples = adapter.decode(exp.clean | {spec.name: f.with_value(spoilt)}, exp.cond)
            except Exception as error:
                raise AssertionError(
                    f"{type(adapter).__name__}, stream '{spec.name}': decode raises {type(error).__name__} on {what} "
                    f"({error}); catch it and return Sample({{}}, ok=False) for that sample"
                ) from error
            case.expect(
                what in wild or not samples[0].ok,
                f"decode calls a sample of {what} ok; return Sample({{}}, ok=False), or a reward scores garbage",
                spec.name,
            )
            case.expect(
                not samples[0].ok or _parts_finite(samples[0].parts),
                f"decode of {what} is called ok but has NaN or infinity in its parts",
                spec.name,
            )
            case.expect(
                [s.ok for s in samples[1:]] == [s.ok for s in good[1:]],
                f"one sample of {what} changes whether the others decode; treat samples one by one",
                spec.name,
            )


def _check_convention(case: Case) -> None:
    """On real data, the trained network denoises better as declared than with its sign or its time turned round."""
    if case.data is None:
        return
    cond = case.adapter.encode(case.requests).to(case.adapter.device)
    for stream, sentence in convention_problems(case.adapter, cond, case.data).items():
        case.expect(False, sentence, stream)


@torch.no_grad()
def convention_problems(adapter: Adapter, cond: Conditioning, data: State) -> dict[str, str]:
    """stream -> what is wrong, for streams that a trained network denoises better with another sign or time direction.

    data: clean latents of the conditioning's samples, real or generated. Empty when all is well.
    """
    rows, problems = len(cond), {}
    for spec in adapter.streams:
        if not spec.process.continuous:
            continue
        space = "velocity" if "velocity" in spec.process.spaces else sorted(spec.process.spaces)[0]
        error: dict[tuple[int, bool], list[Tensor]] = {(sign, flip): [] for sign in (1, -1) for flip in (False, True)}
        for k in range(32):  # near the noise, where the time matters most
            t = torch.full((rows,), 0.7 + 0.3 * (k + 0.5) / 32, device=adapter.device)
            noise = adapter.draw(cond, [generator(SEED, "convention", k, i) for i in range(rows)])
            noisy = adapter.perturb(data, noise, t, cond)
            f = data[spec.name]
            for flip in (False, True):
                out = adapter.forward(noisy, 1 - t if flip else t, cond)[spec.name]
                for sign in (1, -1):
                    square, _ = spec.process.errors(
                        sign * out, f.value, noise[spec.name], noisy[spec.name].value, t, spec.prediction, space
                    )
                    error[sign, flip].append(spec.mean(square, f.acted))
        total = {key: torch.cat(values).double() for key, values in error.items()}
        declared, best = total[1, False], min(total, key=lambda key: float(total[key].nan_to_num(torch.inf).mean()))
        gain = declared - total[best]
        sure = gain.mean() > 0.01 * declared.mean() and gain.mean() > 4 * gain.std() / len(gain) ** 0.5
        what = {(-1, False): "the opposite sign", (1, True): "1 - t for t", (-1, True): "the opposite sign and 1 - t"}
        if sure:
            problems[spec.name] = (
                f"the network denoises better with {what.get(best)} (loss {float(total[best].mean()):.3g} against "
                f"{float(declared.mean()):.3g} as declared); mend the time in predict, or '{spec.prediction}'"
            )
    return problems


CHECKS: tuple[Callable[[Case], None], ...] = (
    _check_draw,
    _check_noise_pairing,
    _check_ends,
    _check_oracle,
    _check_conversion,
    _check_prediction,
    _check_ratio_one,
    _check_centre,
    _check_masks,
    _check_padding,
    _check_batch_order,
    _check_gradient,
    _check_stratification,
    _check_conditioning,
    _check_decode,
    _check_convention,
)
