"""Named copies of the trainable parameters (old, ref, ema): one mechanism, by name, never by adapter toggling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from core.errors import UserError


class Snapshots:
    """Copies of the parameters that require gradient.

    ``use`` swaps values in place; a graph built before a swap must not be backpropagated after it, so read a snapshot's
    predictions first and build the graph afterwards.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if not parameters:
            raise UserError("no trainable parameter to keep a copy of; check tune.mode and tune.targets")
        self.parameters = dict(parameters)
        self.copies: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Copy the current values under this name."""
        if name in self.copies:
            for key, p in self.parameters.items():
                self.copies[name][key].copy_(p)
        else:
            self.copies[name] = {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current; takes the copy if there is none."""
        if name not in self.copies:
            self.take(name)
        for key, p in self.parameters.items():
            self.copies[name][key].lerp_(p.to(self.copies[name][key].dtype), 1 - decay)

    @contextmanager
    @torch.no_grad()
    def use(self, name: str) -> Iterator[None]:
        """Inside, the networks hold the copy's values; afterwards the current ones, also on error."""
        if name not in self.copies:
            raise UserError(f"there is no snapshot '{name}'; taken are {sorted(self.copies)}")
        kept = {key: p.detach().clone() for key, p in self.parameters.items()}
        try:
            for key, p in self.parameters.items():
                p.copy_(self.copies[name][key])
            yield
        finally:
            for key, p in self.parameters.items():
                p.copy_(kept[key])

    def load(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Restore a copy. Raises UserError when it does not fit: a silent partial load is impossible."""
        self._check(values)
        self.copies[name] = {key: values[key].to(p.device).clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Give the parameters these values. Raises UserError when they do not fit."""
        self._check(values)
        for key, p in self.parameters.items():
            p.copy_(values[key])

    def _check(self, values: Mapping[str, Tensor]) -> None:
        odd = sorted(values.keys() ^ self.parameters.keys())
        if odd:
            raise UserError(f"the saved weights do not fit the model: '{odd[0]}' is in only one of them")
        for key, p in self.parameters.items():
            if values[key].shape != p.shape:
                raise UserError(
                    f"the saved weight '{key}' has shape {tuple(values[key].shape)}, the model's {tuple(p.shape)}; "
                    "resume with the same tune.mode, tune.rank and model"
                )
