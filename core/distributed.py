"""Data parallelism by one gradient reduction a step: exact for any split of samples over processes, even or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import nn

from core.errors import UserError

BUCKET = 1 << 26  # elements reduced at a time


def same_on_all(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Give every process the main process's values."""
    if accelerator.num_processes > 1:
        for p in parameters:
            p.data.copy_(broadcast(p.data.contiguous()))


def sum_gradients(accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> None:
    """Sum over processes, in place; a process that had no sample contributes zeros."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if accelerator.num_processes == 1:
        return
    bucket: list[nn.Parameter] = []
    for i, p in enumerate(parameters):
        bucket.append(p)
        if sum(q.numel() for q in bucket) >= BUCKET or i == len(parameters) - 1:
            flat = accelerator.reduce(torch.cat([q.grad.reshape(-1).float() for q in bucket]), "sum")  # type: ignore[union-attr]
            for q, part in zip(bucket, flat.split([q.numel() for q in bucket]), strict=True):
                q.grad = part.view_as(q).to(q.dtype)
            bucket = []


def gather(accelerator: Accelerator, items: list[Any]) -> list[Any]:
    """The lists of all processes joined, on every process."""
    return list(gather_object(items)) if accelerator.num_processes > 1 else items


def from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value on every process."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def assert_same(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Raise UserError when processes hold different weights: unsynchronised training looks like bad luck otherwise."""
    total = sum(float(p.detach().double().sum()) for p in parameters)
    totals = gather(accelerator, [total])
    if any(value != totals[0] for value in totals):
        raise UserError(f"processes hold different weights (checksums {totals}); restart from the last checkpoint")
