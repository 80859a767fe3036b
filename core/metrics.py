"""Where numbers go: ``metrics.jsonl`` (a pure function of the run's inputs) and ``timings.jsonl`` (what is not)."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from core.checkpoint import write_atomic


class MetricsLog:
    """One JSON object a line, keyed by "iteration"; appended and flushed every iteration.

    Seconds and memory go to a second file, so that a resumed run's ``metrics.jsonl`` equals an uninterrupted one's.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = {"metrics": folder / "metrics.jsonl", "timings": folder / "timings.jsonl"}

    def write(self, iteration: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        for path, values in ((self.paths["metrics"], metrics), (self.paths["timings"], timings)):
            with path.open("a", encoding="utf-8") as f:
                row = {k: v if math.isfinite(v) else None for k, v in values.items()}  # NaN is not JSON
                f.write(json.dumps({"iteration": iteration, **row}) + "\n")

    def rewind(self, iteration: int) -> None:
        """Drop the lines of this iteration and later ones (they will be made again) and a half-written last line."""
        for path in self.paths.values():
            if path.exists():
                kept = [json.dumps(row) for row in read(path) if row["iteration"] < iteration]
                write_atomic(path, "".join(line + "\n" for line in kept))


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file; a half-written last line is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Timer:
    """Seconds per phase of the current iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        out = {f"seconds/{name}": value for name, value in self.seconds.items()}
        out["seconds/total"] = sum(self.seconds.values())
        self.seconds = {}
        return out


def peak_memory_mb() -> float:
    """Peak MiB: of the accelerator where there is one, of the process otherwise."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
