"""Preflight checks: what is wrong before training starts, in plain words.

Maintainers of every flow-RL repository answer "my reward is flat" with the same questions; these ask them first.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from core import checkpoint
from core.adapter import Adapter
from core.advantages import Groups
from core.algorithm import Algorithm
from core.cache import ConditioningCache
from core.config import TrainerConfig
from core.errors import UserError
from core.kernels import Kernel
from core.metrics import peak_memory_mb
from core.rewards import RewardSet, checked
from core.rng import generator
from core.rollout import generate
from core.samplers import euler, stochastic
from core.snapshots import Snapshots
from core.surrogate import Experience
from core.testing import convention_problems
from core.types import Request, Sample, State, cat_states
from core.update import accumulate


@dataclass(frozen=True)
class Check:
    """One finding: what was seen and, when it is not good, what to do."""

    name: str
    ok: bool
    message: str


@dataclass
class _Patient:
    adapter: Adapter
    reward: RewardSet
    requests: list[Request]
    algorithm: Algorithm
    parameters: Mapping[str, nn.Parameter]
    config: TrainerConfig
    experience: Experience
    samples: list[Sample]
    group: torch.Tensor

    def requests_of_samples(self) -> list[Request]:
        return [self.requests[int(g)] for g in self.group]


def zero_noise_is_ode(p: _Patient) -> Check:
    """A stochastic sampler with noise 0 must be the Euler sampler (flow_grpo issues 32, 193)."""
    cond = p.experience.cond.index(torch.arange(min(2, len(p.group))))
    noise = p.adapter.draw(cond, [generator(0, "doctor", i) for i in range(len(cond))])
    grid, predict = p.adapter.grid(p.config.rollout.n_steps, cond), p.adapter.guidance.bind(p.adapter, cond)
    start, streams = p.adapter.prior(noise, cond), p.adapter.streams
    silent = stochastic(Kernel("flow_sde", 0.0), lambda k: p.adapter.draw(cond, [generator(0, k)] * len(cond)))
    with torch.no_grad():
        a, b = euler(predict, start, noise, grid, streams), silent(predict, start, noise, grid, streams)
    gap = max(float((a[s.name].value.double() - b[s.name].value.double()).abs().max()) for s in streams)
    size = max(float(a[s.name].value.double().abs().max()) for s in streams)
    ok = gap <= 1e-3 * max(size, 1.0)
    return Check(
        "zero noise is the ODE",
        ok,
        f"largest difference {gap:.1e} of values up to {size:.2g}"
        + ("" if ok else "; predict() is not a function of its inputs: look for dropout or randomness of its own"),
    )


def network_denoises_as_declared(p: _Patient) -> Check:
    """The declared sign and time direction denoise better than the opposite ones (flow_grpo issue 32)."""
    exp = p.experience.index(torch.arange(0, len(p.group), max(1, len(p.group) // 4)))
    problems = convention_problems(p.adapter, exp.cond, exp.clean)
    text = "; ".join(f"stream '{name}': {sentence}" for name, sentence in problems.items())
    return Check("network denoises as declared", not problems, text or "sign and time direction fit the weights")


def ratio_is_one(p: _Patient) -> Check:
    """The surrogate, evaluated twice without an update, gives ratio 1."""
    elbo = p.algorithm.elbo
    first = elbo.evaluate(p.adapter, p.experience, p.config.seed)
    halves = p.experience.micro_batches(max(1, len(p.experience) // 2))
    parts = [elbo.evaluate(p.adapter, half, p.config.seed) for half in halves]
    again = {name: torch.cat([part[name] for part in parts], dim=1) for name in first}
    gap = max(float(((first[n] - again[n]).mean(0).exp() - 1).abs().max()) for n in first)
    low = p.adapter.autocast_dtype is not None
    limit = 1e-4 if low else 1e-5
    clip = p.algorithm.clip
    ok = gap <= limit and (clip is None or gap < clip / 10)
    return Check(
        "ratio is 1 before the first update",
        ok,
        f"largest deviation {gap:.1e} between two passes at different batch sizes (limit {limit:.0e})"
        + ("" if ok else "; use dtype=float32 for the update, the same attention backend, and no dropout"),
    )


def groups_have_spread(p: _Patient) -> Check:
    """Scores differ inside groups; otherwise every advantage is zero and the reward stays flat."""
    result = checked(p.reward, p.samples, p.requests_of_samples(), p.group)
    taught = p.algorithm.advantage.weight_of(p.reward.scores)
    flat = torch.ones(len(p.group), dtype=torch.bool)
    texts = []
    for name in taught:
        score, valid = result.scores[name], result.valid[name]
        flat &= Groups(p.group, valid, torch.where(valid, score, 0.0).double()).flat()
        seen = score[valid]
        texts.append(
            f"{name} mean {float(seen.mean()):.3g} std {float(seen.std(correction=0)):.3g}"
            if len(seen)
            else f"{name} none"
        )
        if not len(seen):
            advice = "no sample could be scored; look at the decoded samples and the reward's requirements"
            return Check("scores spread inside groups", False, f"{texts[-1]}: {advice}")
    share = float(flat.float().mean())
    ok = share < 1
    advice = "; all scores are equal inside every group: use a finer reward, a larger group, or easier prompts"
    return Check(
        "scores spread inside groups",
        ok,
        f"{', '.join(texts)}; {share:.0%} of samples in flat groups" + ("" if ok else advice),
    )


def reward_follows_its_sample(p: _Patient) -> Check:
    """Permuting the inputs permutes the scores (flow_grpo issue 39: N x N scores read as N)."""
    requests = p.requests_of_samples()
    order = torch.arange(len(p.samples) - 1, -1, -1)
    straight = checked(p.reward, p.samples, requests, p.group)
    mixed = checked(p.reward, [p.samples[i] for i in order], [requests[i] for i in order], p.group[order])
    bad = [
        name
        for name in straight.scores
        if not torch.allclose(straight.scores[name][order], mixed.scores[name], rtol=1e-3, atol=1e-4, equal_nan=True)
    ]
    advice = f"; '{bad[0]}' depends on the order of its inputs: score matched pairs only" if bad else ""
    return Check("reward follows its sample", not bad, f"{len(straight.scores)} scores, inputs reversed{advice}")


def gradient_reaches_what_it_should(p: _Patient) -> Check:
    """Every trainable network gets a finite, non-zero gradient; nothing else gets any."""
    snapshots = Snapshots(p.parameters)
    for name in p.algorithm.snapshots:
        snapshots.take(name)
    # Hand-made advantages, so that this says nothing about the reward.
    sign = torch.where(torch.arange(len(p.experience)) % 2 == 0, 1.0, -1.0)
    exp = replace(p.experience, advantage={s.name: sign for s in p.adapter.streams if s.trainable})
    accumulate(p.adapter, p.algorithm, exp, snapshots, p.config.seed, len(exp))
    norms = {k: 0.0 if q.grad is None else float(q.grad.norm()) for k, q in p.parameters.items()}
    ours = {id(q) for q in p.parameters.values()}
    strays = [
        f"{name}.{key}"
        for name, module in p.adapter.modules().items()
        for key, q in module.named_parameters()
        if q.grad is not None and id(q) not in ours
    ]
    for q in p.parameters.values():
        q.grad = None
    reached = sum(n > 0 for n in norms.values())
    bad = [k for k, n in norms.items() if not torch.isfinite(torch.tensor(n))]
    problem = ""
    if bad:
        problem = f"; the gradient of '{bad[0]}' is not finite: lower precision too low, or t = 0 in the surrogate"
    elif strays:
        problem = f"; '{strays[0]}' is frozen but gets a gradient"
    elif reached == 0:
        problem = "; no trainable parameter is reached: predict() must use modules() and not detach"
    return Check(
        "gradient reaches the trainable parameters and only them",
        not problem,
        f"{reached} of {len(norms)} tensors, {sum(q.numel() for q in p.parameters.values()):,} parameters{problem}",
    )


def checkpoint_round_trip(p: _Patient) -> Check:
    """What is saved is what is loaded, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint.save(Path(folder), 1, {"trainable": p.parameters}, {"counters": {"iteration": 1}})
        tensors, _ = checkpoint.load(saved)
    bad = [k for k, q in p.parameters.items() if not torch.equal(tensors["trainable"][k], q.detach().cpu())]
    size = sum(q.numel() * q.element_size() for q in p.parameters.values()) / 2**20
    return Check(
        "checkpoint round trip", not bad, f"{size:.1f} MiB of weights" + (f"; '{bad[0]}' differs" if bad else "")
    )


def memory_estimate(p: _Patient) -> Check:
    """What training holds, by arithmetic, and the peak seen in the checks above."""
    trained = sum(q.numel() * q.element_size() for q in p.parameters.values())
    weights = sum(q.numel() * q.element_size() for m in p.adapter.modules().values() for q in m.parameters())
    copies = 1 + len(p.algorithm.snapshots | ({"ema"} if p.algorithm.ema_decay is not None else set()) | {"ref"})
    state = trained * (1 + 2 + copies)
    have = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    need = weights + state
    ok = have is None or need < 0.8 * have
    return Check(
        "memory",
        ok,
        f"weights {weights / 2**20:.0f} MiB + gradients, Adam and snapshots {state / 2**20:.0f} MiB; "
        f"peak so far {peak_memory_mb():.0f} MiB with {len(p.experience)} samples a pass"
        + ("" if ok else "; use tune.mode=lora, model.gradient_checkpointing=true or a smaller train.micro_batch"),
    )


CHECKS: tuple[Callable[[_Patient], Check], ...] = (
    zero_noise_is_ode,
    network_denoises_as_declared,
    ratio_is_one,
    groups_have_spread,
    reward_follows_its_sample,
    gradient_reaches_what_it_should,
    checkpoint_round_trip,
    memory_estimate,
)


def examine(
    adapter: Adapter,
    reward: RewardSet,
    requests: Sequence[Request],
    algorithm: Algorithm,
    parameters: Mapping[str, nn.Parameter],
    config: TrainerConfig,
) -> list[Check]:
    """Run all checks on a small rollout (up to four groups of up to eight). Leaves weights as they were."""
    algorithm.check(adapter.streams, config.rollout.n_steps, config.prompts * config.group_size)
    for module in adapter.modules().values():
        module.eval()
    picked = torch.linspace(0, len(requests) - 1, min(4, len(requests))).long().tolist()
    chosen, size = [requests[i] for i in picked], min(8, config.group_size)
    with tempfile.TemporaryDirectory() as folder:
        cache = ConditioningCache(adapter, Path(folder))
        cache.prepare(chosen)
        states: list[State] = []
        samples: list[Sample] = []
        grid = torch.zeros(1)
        for g, request in enumerate(chosen):
            cond = cache.get([request] * size)
            state, grid = generate(adapter, cond, [("doctor", g, m) for m in range(size)], config.rollout, config.seed)
            states.append(state)
            samples += adapter.decode(state, cond)
        everything = cache.get([r for r in chosen for _ in range(size)])
    group = torch.arange(len(samples)) // size
    exp = Experience(cat_states(states), everything, group, torch.arange(len(samples)) % size, grid, 0, {})
    patient = _Patient(adapter, reward, chosen, copy.copy(algorithm), parameters, config, exp, samples, group)
    findings = []
    for check in CHECKS:
        try:
            findings.append(check(patient))
        except UserError as error:
            findings.append(Check(check.__name__.replace("_", " "), False, str(error)))
    return findings
