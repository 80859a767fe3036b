"""The loop. It knows requests, an adapter, rewards and an algorithm; no modality and no method by name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from core import checkpoint
from core.adapter import Adapter
from core.algorithm import Algorithm
from core.collector import Collected, Collector
from core.config import TrainerConfig
from core.data import GroupSampler
from core.distributed import assert_same, gather, same_on_all, sum_gradients
from core.errors import UserError
from core.interrupt import first_interrupt
from core.metrics import MetricsLog, Timer, peak_memory_mb
from core.rewards import RewardResult, RewardSet
from core.rng import generator
from core.snapshots import Snapshots
from core.summary import drift_metrics, eval_metrics, policy_metrics, reward_metrics
from core.types import Request, Sample
from core.update import accumulate

log = logging.getLogger("vgrpo")


@dataclass
class Counters:
    """What a checkpoint keeps besides tensors."""

    iteration: int = 0
    steps: int = 0
    skipped: int = 0
    evaluations: int = 0


@dataclass(frozen=True)
class Hooks:
    """Called on the main process: phase (name, done, total), iteration (number, metrics, timings), evaluation."""

    phase: Callable[[str, int, int], None] = lambda name, done, total: None
    iteration: Callable[[int, dict[str, float], dict[str, float]], None] = lambda number, metrics, timings: None
    evaluation: Callable[[int, Sequence[Sample], Sequence[Request], RewardResult], None] = lambda *_: None


class Interrupted(Exception):
    """Asked to stop while nothing had changed since the iteration began."""


class Trainer:
    """``fit`` runs or resumes. One iteration is collect (rollout, scores, advantages) and update (optimizer steps)."""

    def __init__(
        self,
        adapter: Adapter,
        reward: RewardSet,
        train: Sequence[Request],
        held_out: Sequence[Request],
        algorithm: Algorithm,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        folder: Path,
        accelerator: Accelerator | None = None,
        cache: Path | None = None,
        hooks: Hooks = Hooks(),
    ) -> None:
        self.adapter, self.algorithm, self.config, self.folder, self.hooks = adapter, algorithm, config, folder, hooks
        self.accelerator = accelerator or Accelerator()
        self.parameters, self.held_out = dict(parameters), list(held_out)
        if config.eval_with_ema and algorithm.ema_decay is None:
            raise UserError("train.eval_with_ema needs a moving average; set algorithm.ema_decay, for example 0.95")
        sampler = GroupSampler(len(train), config.prompts, config.group_size, config.seed)
        algorithm.check(adapter.streams, config.rollout.n_steps, sampler.batch)
        algorithm.advantage.weight_of(reward.scores)
        cache = cache or folder / "cache"
        self.collector = Collector(
            adapter, reward, train, held_out, sampler, config.rollout, self.accelerator, cache, self._phase
        )
        for module in adapter.modules().values():
            module.eval()  # dropout or condition dropping would make the ratio differ from 1
        same_on_all(self.accelerator, self.parameters.values())
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        )
        self.snapshots = Snapshots(self.parameters)
        self.snapshots.take("ref")
        if algorithm.ema_decay is not None:
            self.snapshots.take("ema")
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.timer, self.counters = MetricsLog(folder), Timer(), Counters()
        self.stop, self.skipped_in_a_row = False, 0

    def fit(self, resume: bool = False) -> None:
        """Train to ``config.iterations``. Ctrl-C saves and returns; a second one stops at once."""
        self.collector.prepare()
        if resume:
            self.restore()
        elif self.accelerator.is_main_process:
            self.log.rewind(0)
        with first_interrupt(self._ask_to_stop), contextlib.suppress(Interrupted):
            if self.counters.iteration == 0:
                self._write(0, self.evaluate())
            while self.counters.iteration < self.config.iterations and not self.stop:
                self._iterate()
            return
        self.save()

    def _iterate(self) -> None:
        cfg, n = self.config, self.counters.iteration
        start = self.adapter.counter.evaluations
        collected = self.collect(n)
        sampled = self.adapter.counter.evaluations
        metrics = reward_metrics(collected.result, collected.advantage, collected.group) | self.update(collected)
        updated = self.adapter.counter.evaluations
        metrics["nfe/rollout"], metrics["nfe/update"] = self._sum(sampled - start), self._sum(updated - sampled)
        self.counters.evaluations += int(metrics["nfe/rollout"] + metrics["nfe/update"])
        metrics["nfe/total"] = self.counters.evaluations
        self.counters.iteration = done = n + 1
        last = done == cfg.iterations
        if last or (cfg.eval_every and done % cfg.eval_every == 0):
            metrics |= self.evaluate()
        self._write(done, metrics)
        self.stop = bool(self._sum(float(self.stop)))
        if last or self.stop or (cfg.checkpoint_every and done % cfg.checkpoint_every == 0):
            self.save()

    def collect(self, iteration: int) -> Collected:
        """Rollout, scores and advantages; with several updates also the old policy's surrogate on the stored pairs."""
        with self.timer.phase("rollout"):
            collected = self.collector.collect(iteration, self.algorithm.advantage, self.config.shuffle_advantages)
        if self.algorithm.on_policy:
            return collected
        with self.timer.phase("old"):
            micros = collected.experience.micro_batches(self.config.micro_batch)
            parts = [self.algorithm.elbo.evaluate(self.adapter, m, self.config.seed) for m in micros]
            old = {name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]}
        return replace(collected, experience=replace(collected.experience, old=old))

    def update(self, collected: Collected) -> dict[str, float]:
        """The optimizer steps of one iteration: samples shuffled and split into ``updates`` parts, ``epochs`` times."""
        algorithm = self.algorithm
        rows: list[dict[str, Any]] = []
        norms: list[float] = []
        if "old" in algorithm.snapshots:
            self.snapshots.take("old")
        with self.timer.phase("update"):
            for epoch in range(algorithm.epochs):
                order = torch.arange(len(collected.group))
                if not algorithm.on_policy:
                    g = generator(self.config.seed, "update", collected.experience.iteration, epoch)
                    order = torch.randperm(len(order), generator=g)
                for k, part in enumerate(order.tensor_split(algorithm.updates)):
                    norms += self._step(collected, part, first=epoch == k == 0, rows=rows)
        out = policy_metrics(gather(self.accelerator, rows))
        out["policy/grad_norm"] = sum(norms) / len(norms) if norms else 0.0
        out["policy/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        out["policy/steps"], out["policy/skipped_steps"] = self.counters.steps, self.counters.skipped
        return out

    def _step(self, collected: Collected, part: Tensor, first: bool, rows: list[dict[str, Any]]) -> list[float]:
        """One optimizer step over the samples numbered ``part``; -> its gradient norm, nothing if no step was taken."""
        cfg, share = self.config, self.collector.share
        teaches = torch.stack([a != 0 for a in collected.advantage.values()]).any(0)
        n_total = len(part)
        if not self.algorithm.snapshots:
            part = part[teaches[part]]  # a zero advantage has a zero gradient: nothing to compute
        if not bool(teaches[part].any()):
            return []
        self.optimizer.zero_grad(set_to_none=True)
        local = collected.experience.index(part[(part >= share.start) & (part < share.stop)] - share.start)
        for k, micro in enumerate(local.micro_batches(cfg.micro_batch)):
            self._phase("update", k * cfg.micro_batch, len(local))
            stats = accumulate(self.adapter, self.algorithm, micro, self.snapshots, cfg.seed, n_total)
            rows.append({"group": micro.group.tolist(), "first": first} | {k: v.tolist() for k, v in stats.items()})
        sum_gradients(self.accelerator, list(self.parameters.values()))
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if not bool(torch.isfinite(norm)):  # before clipping: that would spread one NaN over every gradient
            self._skip()
            return []
        nn.utils.clip_grads_with_norm_(self.parameters.values(), cfg.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.counters.steps += 1
        self.skipped_in_a_row = 0
        if self.algorithm.ema_decay is not None:
            self.snapshots.blend("ema", self.algorithm.ema_decay)
        return [float(norm)]

    def learning_rate(self) -> float:
        """Of the coming optimizer step: a function of the counters, so a resumed run goes on with the same one."""
        cfg, left = self.config, 1 - self.counters.iteration / self.config.iterations
        warm = min(1.0, (self.counters.steps + 1) / max(1, cfg.warmup))
        return cfg.learning_rate * warm * (left if cfg.schedule == "linear" else 1.0)

    def _skip(self) -> None:
        """A non-finite gradient: leave the weights alone, count it, and say where it came from."""
        grads = {k: p.grad for k, p in self.parameters.items() if p.grad is not None}
        largest = max(grads, key=lambda k: float(grads[k].abs().max()))  # finite ones can still overflow the norm
        bad = next((k for k, g in grads.items() if not bool(torch.isfinite(g).all())), largest)
        self.counters.skipped += 1
        self.skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        log.warning("iteration %d: the gradient of '%s' is not finite; step skipped", self.counters.iteration, bad)
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise UserError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite gradient (first in '{bad}'); "
                "lower train.learning_rate or use dtype=float32, and go on from the last checkpoint"
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out scores, and how far the predictions have moved from the start."""
        if not self.held_out:
            return {}
        with self.timer.phase("eval"), self.final_weights():
            samples, result, clean, cond = self.collector.evaluate(self.config.eval_n_steps)
            out = eval_metrics(result, self.held_out)
            out |= drift_metrics(self.adapter, self.snapshots, clean, cond, self.config.micro_batch, self.config.seed)
        if self.accelerator.is_main_process:
            self.hooks.evaluation(self.counters.iteration, samples, self.held_out, result)
        return out

    def final_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the networks hold what is evaluated and exported: the current weights, or their moving average."""
        return self.snapshots.use("ema") if self.config.eval_with_ema else contextlib.nullcontext()

    def save(self) -> None:
        """A checkpoint of all that a resumed run needs; the main process writes, all wait."""
        assert_same(self.accelerator, self.parameters.values())
        if self.accelerator.is_main_process:
            tensors: dict[str, Mapping[str, Tensor]] = {"trainable": self.parameters}
            if "ema" in self.snapshots.copies:
                tensors["ema"] = self.snapshots.copies["ema"]
            state = {
                "optimizer": self.optimizer.state_dict(),
                "counters": vars(self.counters),
                "rng": torch.get_rng_state(),
            }
            checkpoint.save(self.folder / "checkpoints", self.counters.iteration, tensors, state, self.config.keep)
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """From the newest whole checkpoint, or from the start when there is none."""
        found = checkpoint.latest(self.folder / "checkpoints")
        if found is not None:
            tensors, state = checkpoint.load(found)
            self.snapshots.assign(tensors["trainable"])
            if "ema" in tensors:
                self.snapshots.load("ema", tensors["ema"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.counters = Counters(**state["counters"])
            torch.set_rng_state(state["rng"])
        if self.accelerator.is_main_process:
            # Row k is written after iteration k's update and before its checkpoint; row 0 is the first evaluation.
            self.log.rewind(self.counters.iteration + 1 if self.counters.iteration else 0)
        self.accelerator.wait_for_everyone()

    # ---- small things ----

    def _write(self, number: int, metrics: dict[str, float]) -> None:
        timings = self.timer.drain() | {"memory/peak_mb": peak_memory_mb()}
        if self.accelerator.is_main_process:
            self.log.write(number, metrics, timings)
            self.hooks.iteration(number, metrics, timings)

    def _phase(self, name: str, done: int, total: int) -> None:
        if self.stop and name in ("rollout", "reward") and self.accelerator.num_processes == 1:
            raise Interrupted
        if self.accelerator.is_main_process:
            self.hooks.phase(name, done, total)

    def _ask_to_stop(self) -> None:
        self.stop = True
        log.warning("stopping after this step and saving; press Ctrl-C again to stop at once")

    def _sum(self, value: float) -> float:
        return float(sum(gather(self.accelerator, [value])))
