import pytest
import torch

from core.advantages import Advantage, Groups, chain, clamp, soft_clip
from core.rewards import ScoreSpec
from tests.parity.cases import Entry, by_id, entries

METHODS = {
    "flow_grpo_tracker", "group_z", "per_reward_group_z", "advantage_aggregation", "reward_aggregation", "soft_clip",
}  # fmt: skip


def ours(entry: Entry, rewards: torch.Tensor, weights: list[float], **options: object) -> torch.Tensor:
    """Our advantage of rewards [N, K]."""
    names = [f"r{k}" for k in range(rewards.shape[1])]
    specs = [ScoreSpec(name, -1e9, 1e9) for name in names]
    scores = {name: rewards[:, k] for k, name in enumerate(names)}
    valid = {name: torch.ones(len(rewards), dtype=torch.bool) for name in names}
    advantage = Advantage(weights=dict(zip(names, weights, strict=True)), **({"clamp": None} | options))
    return advantage(scores, valid, entry["group"].long(), specs, ["x"])["x"]


@pytest.mark.parametrize("entry", entries("advantages"), ids=by_id)
def test_advantage(entry: Entry) -> None:
    p = entry.params
    if p["method"] not in METHODS:
        pytest.skip(f"issue: other methods ({p['method']})")
    if p["method"] == "soft_clip":
        a = entry["advantage_in"]
        everyone = Groups(torch.zeros(len(a), dtype=torch.int64), torch.ones(len(a), dtype=torch.bool), a)
        entry.check("advantage", Advantage(clamp=None, soft_clip=p["eta"]).limit(a))
        entry.check("advantage", chain(soft_clip(p["eta"]), clamp(1e9))(a, everyone))
        return
    rewards = entry["rewards"].reshape(len(entry["group"]), -1)
    if p["method"] == "flow_grpo_tracker":
        scale = "global" if p["global_std"] else "group"
        entry.check("advantage", ours(entry, rewards, [1.0], scale=scale, eps=p["eps"], ddof=0))
    elif p["method"] == "group_z":
        entry.check("advantage", ours(entry, rewards, [1.0], eps=p["eps"], ddof=p.get("ddof", 1)))
    elif p["method"] == "per_reward_group_z":
        entry.check("advantage_vq", ours(entry, rewards[:, :1], [1.0], eps=p["eps"]))
        entry.check("advantage_mq", ours(entry, rewards[:, 1:2], [1.0], eps=p["eps"]))
    elif p["method"] == "advantage_aggregation":
        options = {"eps": p["eps"], "ddof": p["ddof"], "combine": "advantages"}
        entry.check("advantage_unclamped", ours(entry, rewards, p["weights"], **options))
        entry.check("advantage", ours(entry, rewards, p["weights"], **options | {"clamp": p["clamp"]}))
    else:
        entry.check("advantage", ours(entry, rewards, p["weights"], eps=p["eps"], ddof=p["ddof"], combine="rewards"))


def test_the_trap_is_exactly_zero() -> None:
    """An all-equal group must be 0 to the last bit, not merely within the tolerance."""
    for entry in entries("advantages", method="group_z"):
        if entry.id.startswith("constant_group_trap"):
            out = ours(entry, entry["rewards"].reshape(-1, 1), [1.0], eps=entry.params["eps"])
            assert torch.equal(out[entry["advantage"] == 0], torch.zeros(int((entry["advantage"] == 0).sum())))
