"""Training as real processes: two gloo processes equal one, and a run killed anywhere goes on bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core import checkpoint
from core.metrics import read

ROOT = Path(__file__).parents[2]


def start(env: dict[str, str] | None = None, **arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.core.worker", json.dumps(arguments, default=str)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize(
    ("algorithm", "prompts", "group_size"),
    [("on_policy", 2, 4), ("on_policy", 3, 5), ("multi_step", 1, 7)],  # even; 15 = 8 + 7; one group over both
)
def test_two_processes_equal_one(tmp_path: Path, algorithm: str, prompts: int, group_size: int) -> None:
    settings = {
        "algorithm": algorithm,
        "iterations": 3,
        "prompts": prompts,
        "group_size": group_size,
        "micro_batch": 4,
        "checkpoint_every": 0,
    }
    finish(start(folder=tmp_path / "one", **settings))
    port = str(free_port())
    ranks = [
        start(
            {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "ACCELERATE_USE_CPU": "true"},
            folder=tmp_path / "two",
            **settings,
        )
        for r in range(2)
    ]  # fmt: skip
    finish(*ranks)
    one, two = (load_file(tmp_path / name / "final.safetensors") for name in ("one", "two"))
    untrained = tmp_path / "zero"
    finish(start(folder=untrained, **(settings | {"iterations": 1, "max_grad_norm": 1e-12})))
    # Samples, pairs and advantages are the same; only the order of float32 sums differs. That moves a gradient by about
    # 1e-7 of its size, and Adam divides by the gradient's size, so a step of 1e-3 differs by a small part of itself.
    moved = max(float((one[k] - load_file(untrained / "final.safetensors")[k]).abs().max()) for k in one)
    gap = max(float((one[k] - two[k]).abs().max()) for k in one)
    assert moved > 1e-3
    assert gap < 2e-5, f"largest difference {gap:.1e} where the weights moved by {moved:.1e}"
    rows = [read(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for a, b in zip(*rows, strict=True):
        for key in a:
            if key.startswith(("reward/", "group/", "eval/", "nfe/", "policy/steps")):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_killed_at_ten_random_moments_equals_uninterrupted(tmp_path: Path) -> None:
    settings = {
        "algorithm": "multi_step",
        "iterations": 60,
        "prompts": 2,
        "group_size": 4,
        "micro_batch": 4,
        "checkpoint_every": 3,
        "eval_every": 7,
    }
    finish(start(folder=tmp_path / "whole", **settings))
    rng, kills, resume = random.Random(0), 0, False
    while kills < 10:
        process = start(folder=tmp_path / "killed", resume=resume, **settings)
        assert process.stdout is not None
        process.stdout.readline()  # it is at work
        time.sleep(rng.uniform(0, 0.5))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL, "the run ended before ten kills; make it longer"
        kills, resume = kills + 1, True
    finish(start(folder=tmp_path / "killed", resume=True, **settings))
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    a, b = (load_file(folder / "final.safetensors") for folder in (whole, killed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    newest = [checkpoint.latest(folder / "checkpoints") for folder in (whole, killed)]
    (a, state_a), (b, state_b) = (checkpoint.load(folder) for folder in newest if folder is not None)
    assert all(torch.equal(a["ema"][k], b["ema"][k]) for k in a["ema"])
    for x, y in zip(state_a["optimizer"]["state"].values(), state_b["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(x[k], y[k]) for k in x)


def test_interrupt_saves_and_resumes(tmp_path: Path) -> None:
    settings = {
        "algorithm": "on_policy",
        "iterations": 40,
        "prompts": 2,
        "group_size": 4,
        "micro_batch": 8,
        "checkpoint_every": 0,
        "eval_every": 0,
    }
    process = start(folder=tmp_path / "run", **settings)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    finish(process)
    stopped = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert stopped is not None
    assert int(stopped.name.split("_")[-1]) < 40
    finish(start(folder=tmp_path / "run", resume=True, **settings))
    finish(start(folder=tmp_path / "whole", **settings))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
