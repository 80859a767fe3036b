"""What is trained: exactly the LoRA weights, or everything; never nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core.errors import UserError
from core.parameters import make_trainable


class Attention(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, 8) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(8, width), nn.Identity()])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.to_out[0](self.to_q(x) * self.to_k(x) + self.to_v(x)))


def net() -> nn.Module:
    return nn.Sequential(Attention(), Attention())


@pytest.mark.parametrize("rank", [1, 4])
def test_lora_count(rank: int) -> None:
    module = net()
    trainable = make_trainable({"transformer": module}, "lora", rank=rank, alpha=2 * rank)
    # Two blocks of q, k, v (6 -> 8) and out (8 -> 6): rank * (in + out) each.
    assert sum(p.numel() for p in trainable.values()) == 2 * 4 * rank * (6 + 8)
    assert len(trainable) == 2 * 4 * 2
    assert all(key.startswith("transformer.") and "lora_" in key for key in trainable)
    free = {id(p) for p in module.parameters() if p.requires_grad}
    assert free == {id(p) for p in trainable.values()}


def test_lora_starts_as_the_identity_and_learns() -> None:
    torch.manual_seed(0)
    module, x = net(), torch.randn(3, 6)
    before = module(x).detach()
    trainable = make_trainable({"m": module}, "lora", rank=2, alpha=4)
    assert torch.equal(module(x), before)
    module(x).square().sum().mul(0.5).sub(module(x)[0, 0]).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in trainable.values())
    torch.optim.SGD(trainable.values(), 0.1).step()
    assert not torch.equal(module(x), before)


def test_lora_weights_are_float32_on_a_half_base() -> None:
    module = net().to(torch.bfloat16)
    trainable = make_trainable({"m": module}, "lora", rank=2, alpha=4, targets=["to_q"])
    assert len(trainable) == 4
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_regular_expression_is_a_target_too() -> None:
    trainable = make_trainable({"m": net()}, "lora", rank=2, alpha=4, targets=r"0\.to_(q|k)")
    assert len(trainable) == 4


@pytest.mark.parametrize("targets", [["to_nowhere"], r"x\.y"])
def test_no_match_is_an_error(targets: list[str] | str) -> None:
    with pytest.raises(UserError, match=r"tune.targets.*'transformer'") as error:
        make_trainable({"transformer": net()}, "lora", targets=targets)
    assert "\n" not in str(error.value)


def test_no_match_in_one_of_several_modules_is_an_error() -> None:
    with pytest.raises(UserError, match="'head'"):
        make_trainable({"transformer": net(), "head": nn.Sequential(nn.Linear(2, 2))}, "lora")


def test_full() -> None:
    module = net().requires_grad_(False)
    trainable = make_trainable({"a": module, "b": nn.Linear(2, 3)}, "full")
    assert all(p.requires_grad for p in module.parameters())
    assert {key for key in trainable if key.startswith("a.")} == {f"a.{key}" for key, _ in module.named_parameters()}
    assert sum(p.numel() for p in trainable.values()) == sum(p.numel() for p in module.parameters()) + 9
    assert list(trainable) == list(make_trainable({"a": net(), "b": nn.Linear(2, 3)}, "full"))  # a fixed order


def test_nothing_to_train_and_unknown_modes() -> None:
    with pytest.raises(UserError, match="no parameter to train"):
        make_trainable({"m": nn.Identity()}, "full")
    with pytest.raises(UserError, match="lora or full"):
        make_trainable({"m": net()}, "qlora")
