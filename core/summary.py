"""Samples' statistics -> the metrics of an iteration, under the field's standard names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.adapter import Adapter
from core.rewards import RewardResult
from core.rng import generator
from core.snapshots import Snapshots
from core.surrogate import variation
from core.types import Conditioning, Request, State, index_state, pad_noise


def reward_metrics(result: RewardResult, advantage: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Per score: mean, std, valid fraction. group/zero_std_fraction: groups in which no sample has an advantage."""
    out: dict[str, float] = {}
    for name, score in result.scores.items():
        values = score[result.valid[name]]
        out[f"reward/{name}/mean"] = float(values.mean()) if len(values) else float("nan")
        out[f"reward/{name}/std"] = float(values.std(correction=0)) if len(values) else float("nan")
        out[f"reward/{name}/valid_fraction"] = float(result.valid[name].float().mean())
    teaches = torch.stack([a != 0 for a in advantage.values()]).any(0).float()
    per_group = torch.zeros(int(group.max()) + 1).index_add(0, group, teaches)
    out["group/zero_std_fraction"] = float((per_group == 0).float().mean())
    return out


def policy_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """rows: one per micro-batch, statistics [B] as lists, "group" [B] and "first" (was it the first optimizer step)."""
    if not rows:
        return {}
    columns = {k: torch.tensor([x for row in rows for x in row[k]]) for k in rows[0] if k != "first"}
    first = torch.tensor([row["first"] for row in rows for _ in row["group"]])
    group, out = columns.pop("group"), {"policy/loss": float(columns.pop("loss").mean())}
    several = sum(k.startswith("ratio/") for k in columns) > 1
    for key, x in columns.items():
        kind, stream = key.split("/", 1)
        tail = f"/{stream}" if several else ""
        if kind == "surrogate":
            spread = variation(x, group)
            out[f"surrogate/mean{tail}"] = float(x.mean())
            out[f"surrogate/cv{tail}"], out[f"surrogate/cv_within{tail}"] = spread["cv"], spread["cv_within"]
        elif kind == "ratio":
            out[f"policy/ratio_mean{tail}"] = float(x.mean())
            out[f"policy/ratio_max_deviation{tail}"] = float((x - 1).abs().max())
            # Before the first update of an iteration every ratio must be 1; what is seen here is numerical noise.
            out[f"policy/ratio_first_deviation{tail}"] = float((x[first] - 1).abs().max()) if bool(first.any()) else 0.0
        elif kind == "regulariser":
            out[key] = float(x.mean())
        else:
            out[f"policy/{kind}{tail}"] = float(x.mean())
    return out


def eval_metrics(result: RewardResult, requests: Sequence[Request]) -> dict[str, float]:
    """eval/<score>, and eval/<score>/<tag> where requests carry a "tag" in their meta."""
    out: dict[str, float] = {}
    tags = [r.meta.get("tag") for r in requests]
    for name, score in result.scores.items():
        valid = result.valid[name]
        for tag in [None, *sorted({t for t in tags if t is not None})]:
            at = valid & torch.tensor([tag is None or t == tag for t in tags])
            key = f"eval/{name}" + (f"/{tag}" if tag is not None else "")
            out[key] = float(score[at].mean()) if bool(at.any()) else float("nan")
    return out


@torch.no_grad()
def drift_metrics(
    adapter: Adapter, snapshots: Snapshots, clean: State, cond: Conditioning, batch: int, seed: int
) -> dict[str, float]:
    """The network against its start, on clean samples noised to t = 0.5: ratio of output norms (RL inflates them,
    arXiv 2606.27771) and squared difference relative to the start's squared norm."""
    rows = torch.arange(min(len(cond), batch))
    clean, cond = index_state(clean, rows.to(adapter.device)), cond.index(rows)
    noise = pad_noise(adapter.draw(cond, [generator(seed, "drift", i) for i in rows.tolist()]), clean)
    t = torch.full((len(rows),), 0.5, device=adapter.device)
    noisy = adapter.perturb(clean, noise, t, cond)
    now = adapter.forward(noisy, t, cond)
    with snapshots.use("ref"):
        ref = adapter.forward(noisy, t, cond)
    out: dict[str, float] = {}
    for spec in adapter.streams:
        a, b, acted = now[spec.name], ref[spec.name], clean[spec.name].acted
        size = max(float(spec.mean(b.square(), acted).mean()), 1e-12)
        tail = f"/{spec.name}" if len(adapter.streams) > 1 else ""
        out[f"model/velocity_norm_ratio{tail}"] = (float(spec.mean(a.square(), acted).mean()) / size) ** 0.5
        out[f"model/velocity_drift{tail}"] = float(spec.mean((a - b).square(), acted).mean()) / size
    return out
