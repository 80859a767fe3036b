"""Which prompts an iteration uses and which samples a process makes: pure functions of the iteration number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.errors import UserError
from core.rng import generator


@dataclass(frozen=True)
class GroupSampler:
    """Endless shuffled passes over the requests, ``prompts`` of them an iteration, ``group_size`` samples each.

    Any number of prompts, group size, micro-batch and processes is legal, except what cannot train: a group of one has
    no baseline. Stateless, so the data position of a checkpoint is the iteration number.
    """

    n_requests: int
    prompts: int
    group_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.n_requests < 1:
            raise UserError("there are no prompts; give at least one in data.prompts, or a file with one a line")
        if self.prompts < 1:
            raise UserError(f"train.prompts is {self.prompts}; use 1 or more prompts an iteration")
        if self.group_size < 2:
            raise UserError(
                f"train.group_size is {self.group_size}: a group of one has no spread and no advantage; "
                "the nearest legal value is 2, usual ones are 8 to 24"
            )

    @property
    def batch(self) -> int:
        return self.prompts * self.group_size

    def requests(self, iteration: int) -> list[int]:
        """The request numbers of this iteration's groups, [prompts]."""
        out = []
        for position in range(iteration * self.prompts, (iteration + 1) * self.prompts):
            epoch, place = divmod(position, self.n_requests)
            out.append(self._permutation(epoch)[place])
        return out

    def _permutation(self, epoch: int) -> list[int]:
        return torch.randperm(self.n_requests, generator=generator(self.seed, "data", epoch)).tolist()

    def share(self, process: int, n_processes: int) -> range:
        """The sample numbers (group * group_size + member) of one process: contiguous, sizes differ by at most one."""
        if n_processes > self.batch:
            raise UserError(
                f"{self.batch} samples an iteration cannot feed {n_processes} processes; "
                f"use train.prompts >= {-(-n_processes // self.group_size)} or fewer processes"
            )
        base, extra = divmod(self.batch, n_processes)
        start = process * base + min(process, extra)
        return range(start, start + base + (process < extra))
