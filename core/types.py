"""The nouns of the framework: streams, batches of them, requests, conditionings, decoded samples.

Canonical time everywhere outside an adapter: ``t`` in [0, 1], float32, 0 = data, 1 = prior noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One stream of one batch.

    value: [B, *sites, *event]. valid: bool [B, *sites], real sites (the rest is padding).
    acted: bool [B, *sites], sites the policy produced; the loss mask, ``acted <= valid``.
    """

    value: Tensor
    valid: Tensor
    acted: Tensor

    @classmethod
    def dense(cls, value: Tensor, n_event_axes: int = 0) -> Field:
        """A field whose sites are all real and all acted; the last ``n_event_axes`` axes are the event."""
        shape = value.shape[: value.ndim - n_event_axes]
        mask = torch.ones(shape, dtype=torch.bool, device=value.device)
        return cls(value, mask, mask)

    def with_value(self, value: Tensor) -> Field:
        return replace(self, value=value)

    def index(self, idx: Tensor | slice) -> Field:
        return Field(self.value[idx], self.valid[idx], self.acted[idx])

    def to(self, device: torch.device | str) -> Field:
        return Field(self.value.to(device), self.valid.to(device), self.acted.to(device))


State = dict[str, Field]  # stream name -> field
Noise = dict[str, Tensor]  # stream name -> base randomness, [B, *sites, *event] (two uniforms a site for categories)
Predictions = dict[str, Tensor]  # stream name -> network output, [B, *sites, *event]
Predict = Callable[[State, Tensor], Predictions]  # (noisy state, t [B]) -> predictions


def index_state(state: State, idx: Tensor | slice) -> State:
    return {name: f.index(idx) for name, f in state.items()}


def index_noise(noise: Noise, idx: Tensor | slice) -> Noise:
    return {name: x[idx] for name, x in noise.items()}


def pad_noise(noise: Noise, state: State) -> Noise:
    """Zero-pad the sites to the state's: part of a ragged batch draws noise only as long as its own longest sample."""
    out: Noise = {}
    for name, x in noise.items():
        sites = state[name].valid.shape[1:]
        if x.shape[1 : 1 + len(sites)] == sites:
            out[name] = x
        else:
            wide = x.new_zeros(len(x), *sites, *x.shape[1 + len(sites) :])
            wide[(slice(None), *(slice(0, n) for n in x.shape[1 : 1 + len(sites)]))] = x
            out[name] = wide
    return out


def _cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along axis 0; the other axes are zero-padded at the end to the longest."""
    shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in tensors), strict=True)]
    if all(list(x.shape[1:]) == shape for x in tensors):
        return torch.cat(list(tensors))
    out = tensors[0].new_zeros(sum(len(x) for x in tensors), *shape)
    row = 0
    for x in tensors:
        out[(slice(row, row + len(x)), *(slice(0, n) for n in x.shape[1:]))] = x
        row += len(x)
    return out


def cat_states(states: Sequence[State]) -> State:
    """One batch of several; ragged sites are padded and marked not valid."""
    return {
        name: Field(*(_cat_padded([getattr(s[name], part) for s in states]) for part in ("value", "valid", "acted")))
        for name in states[0]
    }


@dataclass(frozen=True)
class Request:
    """What a user or a row of a data set asks for.

    inputs: prompt, negative prompt, references ... geometry: height, width, frames, seconds, n_atoms ...; fixes the
    shape of the state, hence is equal within a group. meta: for rewards only.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    geometry: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditioning:
    """Requests as the network sees them: cacheable, indexable, re-batchable.

    tensors: name -> [B, ...]; axes after the first may be padded when batches are joined, so an adapter that needs to
    know stores a mask or a length beside them. geometry: one mapping per sample.
    """

    tensors: Mapping[str, Tensor]
    geometry: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        for name, x in self.tensors.items():
            if len(x) != len(self.geometry):
                raise ValueError(f"conditioning '{name}' has {len(x)} rows for {len(self.geometry)} samples")

    def __len__(self) -> int:
        return len(self.geometry)

    def index(self, idx: Tensor) -> Conditioning:
        """The rows ``idx`` [M] (int64), in that order; repeating an index repeats the row."""
        rows = idx.tolist()
        return Conditioning(
            {name: x[idx.to(x.device)] for name, x in self.tensors.items()}, tuple(self.geometry[i] for i in rows)
        )

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning({name: x.to(device) for name, x in self.tensors.items()}, self.geometry)

    @classmethod
    def collate(cls, items: Sequence[Conditioning]) -> Conditioning:
        names = items[0].tensors.keys()
        return cls(
            {name: _cat_padded([item.tensors[name] for item in items]) for name in names},
            tuple(g for item in items for g in item.geometry),
        )


@dataclass(frozen=True)
class Sample:
    """One decoded item, as rewards see it. ok is False when decoding itself failed.

    parts: "image": uint8 [H, W, 3], "video": uint8 [T, H, W, 3], "audio": float32 [C, T], "text": str ...
    """

    parts: Mapping[str, Any]
    ok: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
