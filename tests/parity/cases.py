"""Parity fixtures: numbers that public implementations produced for random inputs (see MANIFEST.json for each source).

Where they are read from, first that applies: the folder named by VGRPO_PARITY_DIR (a second set in the same format),
``../shared/parity`` beside the repository, the copy in ``tests/parity/data``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def folder() -> Path:
    if chosen := os.environ.get("VGRPO_PARITY_DIR"):
        return Path(chosen)
    shared = ROOT.parent / "shared" / "parity"
    return shared if (shared / "MANIFEST.json").exists() else Path(__file__).parent / "data"


@cache
def manifest() -> dict[str, Any]:
    return json.loads((folder() / "MANIFEST.json").read_text(encoding="utf-8"))


@cache
def arrays(case: str) -> dict[str, Tensor]:
    return load_file(folder() / manifest()["cases"][case]["file"])


@dataclass(frozen=True)
class Entry:
    """One line of a case: its parameters, its tensors by logical name (``entry["mean"]``), its tolerances."""

    case: str
    id: str
    params: dict[str, Any]
    inputs: dict[str, str]
    outputs: dict[str, str]

    def __getitem__(self, name: str) -> Tensor:
        return arrays(self.case)[(self.inputs | self.outputs)[name]]

    def check(self, name: str, actual: Tensor) -> None:
        """The manifest's rule: |actual - stored| <= rtol |stored| + atol + atol_times_max max|stored|, same shape."""
        expected, rule = self[name].double(), manifest()["cases"][self.case]["tolerance"][name]
        actual = torch.as_tensor(actual).detach().double()
        assert actual.shape == expected.shape, f"{self.id} {name}: {tuple(actual.shape)} != {tuple(expected.shape)}"
        bound = rule["rtol"] * expected.abs() + rule["atol"] + rule["atol_times_max"] * expected.abs().max()
        excess = ((actual - expected).abs() - bound).max()
        assert excess <= 0, f"{self.case} {self.id} {name}: {float(excess):.3e} beyond the tolerance"


def entries(case: str, **params: Any) -> list[Entry]:
    """The entries of a case whose parameters have these values."""
    found = [Entry(case, e["id"], e["params"], e["inputs"], e["outputs"]) for e in manifest()["cases"][case]["entries"]]
    return [e for e in found if all(e.params.get(key) == value for key, value in params.items())]


def by_id(entry: Entry) -> str:
    return entry.id
