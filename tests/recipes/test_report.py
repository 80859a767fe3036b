"""Grids and the run report, on run folders made here."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.errors import UserError
from recipes import grids, report
from recipes.grids import image_grid, save_png
from recipes.report import health, write_report
from rewards import scenes

CONFIG = """
run: train
model:
  path: embedded
  dtype: float32
algorithm:
  clip: {clip}
  updates: {updates}
  advantage:
    soft_clip: 3.0
  elbo:
    n_pairs: 4
    share: t_noise
train:
  iterations: {iterations}
  prompts: 12
  group_size: 16
  learning_rate: 3.0e-4
tune:
  mode: lora
  rank: 16
report:
  main_score: scene_correct
"""
ENVIRONMENT = {
    "command": "python -m recipes.t2i_flux algorithm=vgrpo_multi_step train.seed=1",
    "commit": "0123abcd",
    "uncommitted_changes": False,
    "gpu": None,
    "packages": {"torch": "2.9.0", "diffusers": "0.38.0"},
}


def metric_rows(iterations: int, updates: int = 4, eval_every: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """What a healthy run writes: two scores, the scenes' tags, held-out values that rise."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for n in range(iterations + 1):
        done = 1 - math.exp(-2.5 * n / max(1, iterations))
        row: dict[str, Any] = {"iteration": n}
        if n:
            for score, base in (("scene", 0.55), ("scene_correct", 0.38)):
                row[f"reward/{score}/mean"] = base + 0.36 * done + 0.03 * rng.standard_normal()
                row[f"reward/{score}/std"] = 0.34 - 0.1 * done
                row[f"reward/{score}/valid_fraction"] = 1.0
            moved = 0.012 * (updates > 1)
            row |= {
                "group/zero_std_fraction": float(np.clip(0.08 + 0.2 * done + 0.05 * rng.standard_normal(), 0, 1)),
                "policy/loss": 0.01 * rng.standard_normal(),
                "policy/ratio_mean": 1.0,
                "policy/ratio_max_deviation": moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/ratio_first_deviation": 0.0,
                "policy/clipfrac": 8 * moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/approx_kl": 0.002 * moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/grad_norm": 0.5 * float(np.exp(0.2 * rng.standard_normal())),
                "policy/steps": n * updates,
                "policy/skipped_steps": 0,
                "surrogate/mean": -0.4,
                "surrogate/cv": 0.13 + 0.01 * rng.standard_normal(),
                "surrogate/cv_within": 0.04 + 0.004 * rng.standard_normal(),
                "nfe/rollout": 1920,
                "nfe/update": 1536,
                "nfe/total": 3456 * n,
            }
        if n % eval_every == 0 or n == iterations:
            for score, base in (("scene", 0.54), ("scene_correct", 0.36)):
                row[f"eval/{score}"] = base + 0.37 * done
                for k, tag in enumerate(scenes.TAGS):
                    row[f"eval/{score}/{tag}"] = min(1.0, base + 0.2 - 0.09 * k + (0.25 + 0.03 * k) * done)
            row |= {"model/velocity_norm_ratio": 1 + 0.02 * done, "model/velocity_drift": 0.04 * done}
        rows.append(row)
    return rows


def timing_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for row in rows:
        seconds = {"seconds/rollout": 2.1, "seconds/update": 3.2} if row["iteration"] else {}
        if any(key.startswith("eval/") for key in row):
            seconds["seconds/eval"] = 4.5
        total = {"seconds/total": sum(seconds.values())}
        out.append({"iteration": row["iteration"], **seconds, **total, "memory/peak_mb": 1850.0})
    return out


def pictures(correct: float, seed: int = 0, n: int = 30) -> Image.Image:
    """Held-out scenes, a share of them drawn right and the others with one thing wrong."""
    rng = np.random.default_rng(seed)
    by_tag = scenes.split()[1]
    asked = [found[i % len(found)] for found in by_tag.values() for i in range(n // len(by_tag))]
    marks = [bool(rng.random() < correct) for _ in asked]
    drawn = [
        scenes.render(scene if mark else scenes.near_miss(scene, rng), rng)
        for scene, mark in zip(asked, marks, strict=True)
    ]
    return image_grid([torch.from_numpy(x) for x in drawn], [s.prompt for s in asked], marks, columns=5)


def fake_run(
    folder: Path,
    rows: list[dict[str, Any]],
    timings: bool = True,
    samples: bool = True,
    config: str | None = None,
    environment: Mapping[str, Any] | None = ENVIRONMENT,
) -> Path:
    folder.mkdir(parents=True)
    text = CONFIG.format(clip=0.01, updates=4, iterations=max(1, len(rows) - 1)) if config is None else config
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    if environment is not None:
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if timings:
        lines = "".join(json.dumps(row) + "\n" for row in timing_rows(rows))
        (folder / "timings.jsonl").write_text(lines, encoding="utf-8")
    if samples:
        for n, correct in ((0, 0.3), (len(rows) // 2, 0.6), (len(rows) - 1, 0.85)):
            save_png(pictures(correct), folder / "samples" / f"iteration_{n:06d}.png")
    return folder
