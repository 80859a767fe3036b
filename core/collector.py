"""Experience: requests -> samples -> scores -> advantages, for training and for held-out evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from core.adapter import Adapter
from core.advantages import Advantage
from core.cache import ConditioningCache
from core.data import GroupSampler
from core.distributed import from_main, gather
from core.errors import UserError
from core.rewards import RewardResult, RewardSet, checked
from core.rng import generator
from core.rollout import RolloutConfig, generate
from core.surrogate import Experience
from core.types import Conditioning, Request, Sample, State, cat_states

OnPhase = Callable[[str, int, int], None]  # (phase, done, total) in samples


@dataclass(frozen=True)
class Collected:
    """experience: this process's share. advantage: stream -> [N] of all processes. result: scores of all N samples."""

    experience: Experience
    advantage: dict[str, Tensor]
    result: RewardResult
    group: Tensor


class Collector:
    """Makes experience. Samples are numbered group * group_size + member; each process owns one contiguous share."""

    def __init__(
        self,
        adapter: Adapter,
        reward: RewardSet,
        train: Sequence[Request],
        held_out: Sequence[Request],
        sampler: GroupSampler,
        rollout: RolloutConfig,
        accelerator: Accelerator,
        cache: Path,
        on_phase: OnPhase,
    ) -> None:
        self.adapter, self.reward, self.train, self.held_out = adapter, reward, list(train), list(held_out)
        self.sampler, self.config, self.accelerator, self.on_phase = sampler, rollout, accelerator, on_phase
        self.share = sampler.share(accelerator.process_index, accelerator.num_processes)
        self.cache = ConditioningCache(adapter, cache)

    def prepare(self) -> None:
        """Encode every prompt once, then let the encoders go."""
        if self.accelerator.is_main_process:
            self.cache.prepare([*self.train, *self.held_out])
        self.accelerator.wait_for_everyone()
        self.adapter.release_encoders()

    def _generate(
        self, phase: str, requests: Sequence[Request], names: Sequence[tuple[str | int, ...]], config: RolloutConfig
    ) -> tuple[State, Conditioning, Tensor, list[Sample]]:
        states, conds, grids, samples = [], [], [], []
        for start in range(0, len(requests), config.batch):
            self.on_phase(phase, start, len(requests))
            part = slice(start, start + config.batch)
            cond = self.cache.get(requests[part])
            state, grid = generate(self.adapter, cond, names[part], config, self.sampler.seed)
            state, finite = _finite(state)
            states.append(state)
            conds.append(cond)
            grids.append(grid)
            decoded = self.adapter.decode(state, cond)
            samples += [s if ok else replace(s, ok=False) for s, ok in zip(decoded, finite, strict=True)]
        return cat_states(states), Conditioning.collate(conds), _cat_grids(grids, [len(c) for c in conds]), samples

    def _score(self, numbered: list[tuple[int, Sample]], requests: Sequence[Request], group: Tensor) -> RewardResult:
        """Scores of all samples on every process. Rewards that compare samples see them all at once."""
        if self.reward.scope == "sample":
            mine = [n for n, _ in numbered]
            local = checked(self.reward, [s for _, s in numbered], [requests[n] for n in mine], group[mine])
            rows = [
                (n, {name: (float(local.scores[name][i]), bool(local.valid[name][i])) for name in local.scores})
                for i, n in enumerate(mine)
            ]
            scored = [row for _, row in sorted(gather(self.accelerator, rows), key=lambda item: item[0])]
            names = [spec.name for spec in self.reward.scores]
            return RewardResult(
                {name: torch.tensor([row[name][0] for row in scored]) for name in names},
                {name: torch.tensor([row[name][1] for row in scored]) for name in names},
            )
        everyone = [s for _, s in sorted(gather(self.accelerator, numbered), key=lambda item: item[0])]
        result = checked(self.reward, everyone, requests, group) if self.accelerator.is_main_process else None
        return from_main(self.accelerator, result)

    def collect(self, iteration: int, advantage: Advantage, shuffle: bool = False) -> Collected:
        """One iteration's rollout. shuffle: permute advantages within each group, the control that must not learn."""
        size, numbers = self.sampler.group_size, list(self.share)
        requests = [self.train[i] for i in self.sampler.requests(iteration) for _ in range(size)]
        names: list[tuple[str | int, ...]] = [("rollout", iteration, *divmod(n, size)) for n in numbers]
        clean, cond, grid, samples = self._generate("rollout", [requests[n] for n in numbers], names, self.config)
        self.on_phase("reward", 0, len(numbers))
        group = torch.arange(self.sampler.batch) // size
        result = self._score(list(zip(numbers, samples, strict=True)), requests, group)
        self._refuse_dead_scores(result, advantage.weight_of(self.reward.scores), requests)
        streams = [spec.name for spec in self.adapter.streams if spec.trainable]
        values = advantage(result.scores, result.valid, group, self.reward.scores, streams)
        if shuffle:
            g = generator(self.sampler.seed, "shuffle", iteration)
            order = torch.cat([k * size + torch.randperm(size, generator=g) for k in range(self.sampler.prompts)])
            values = {name: a[order] for name, a in values.items()}
        mine = torch.tensor(numbers)
        exp = Experience(
            clean, cond, group[mine], mine % size, grid, iteration, {name: a[mine] for name, a in values.items()}
        )
        return Collected(exp, values, result, group)

    def _refuse_dead_scores(self, result: RewardResult, names: Iterable[str], requests: Sequence[Request]) -> None:
        for name in names:
            if not bool(result.valid[name].any()):
                raise UserError(
                    f"the score '{name}' is missing or not finite for all {len(requests)} samples (first request: "
                    f"{dict(requests[0].inputs)}); mend the reward, or leave it out with advantage.weights"
                )

    def evaluate(self, n_steps: int | None) -> tuple[list[Sample], RewardResult, State, Conditioning]:
        """Held-out requests with fixed noise, so that two evaluations differ by the weights alone.

        -> samples and scores of all processes, and this process's own clean states.
        """
        config = replace(self.config, n_steps=n_steps or self.config.n_steps)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        numbers = list(range(len(self.held_out)))[rank::world]
        names: list[tuple[str | int, ...]] = [("eval", n) for n in numbers]
        clean, cond, _, mine = self._generate("eval", [self.held_out[n] for n in numbers], names, config)
        numbered = sorted(gather(self.accelerator, list(zip(numbers, mine, strict=True))), key=lambda item: item[0])
        samples = [s for _, s in numbered]
        result = checked(self.reward, samples, self.held_out, torch.arange(len(samples)))
        self._refuse_dead_scores(result, [spec.name for spec in self.reward.scores], self.held_out)
        return samples, result, clean, cond


def _finite(state: State) -> tuple[State, list[bool]]:
    """Zero the samples that are NaN or infinite, and say which are not: 0 times NaN would reach every gradient."""
    ok = torch.stack([torch.isfinite(f.value).flatten(1).all(1) for f in state.values()]).all(0)
    if bool(ok.all()):
        return state, ok.tolist()
    zeroed = {
        name: f.with_value(torch.where(ok.reshape(-1, *(1,) * (f.value.ndim - 1)), f.value, 0))
        for name, f in state.items()
    }
    return zeroed, ok.tolist()


def _cat_grids(grids: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """[n + 1] where every part had the same grid, otherwise one column a sample."""
    if all(g.ndim == 1 and torch.equal(g, grids[0]) for g in grids):
        return grids[0]
    columns = [g if g.ndim == 2 else g.unsqueeze(1).expand(-1, n) for g, n in zip(grids, sizes, strict=True)]
    return torch.cat(columns, dim=1)
