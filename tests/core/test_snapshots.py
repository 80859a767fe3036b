"""Copies of parameters by name: what goes in comes out, and the current values are never lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from core.errors import UserError
from core.snapshots import Snapshots


def model() -> tuple[nn.Module, Snapshots]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return net, Snapshots(dict(net.named_parameters()))


def fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)


def values(net: nn.Module) -> set[float]:
    return {float(x) for p in net.parameters() for x in p.flatten()}


def test_use_swaps_and_restores() -> None:
    net, snapshots = model()
    fill(net, 1.0)
    snapshots.take("old")
    fill(net, 2.0)
    with snapshots.use("old"):
        assert values(net) == {1.0}
    assert values(net) == {2.0}


def test_use_restores_after_an_error_and_when_nested() -> None:
    net, snapshots = model()
    for value, name in ((1.0, "ref"), (2.0, "old"), (3.0, None)):
        fill(net, value)
        if name:
            snapshots.take(name)
    with pytest.raises(RuntimeError, match="boom"), snapshots.use("old"):
        raise RuntimeError("boom")
    assert values(net) == {3.0}
    with snapshots.use("old"):
        with snapshots.use("ref"):
            assert values(net) == {1.0}
        assert values(net) == {2.0}
    assert values(net) == {3.0}


def test_a_copy_does_not_follow_the_parameters() -> None:
    net, snapshots = model()
    fill(net, 1.0)
    snapshots.take("old")
    net(torch.randn(5, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    with snapshots.use("old"):
        assert values(net) == {1.0}
        fill(net, 9.0)  # nor does it change when its user writes
    with snapshots.use("old"):
        assert values(net) == {1.0}


def test_take_again_replaces() -> None:
    net, snapshots = model()
    for value in (1.0, 2.0):
        fill(net, value)
        snapshots.take("old")
    fill(net, 3.0)
    with snapshots.use("old"):
        assert values(net) == {2.0}


def test_gradients_flow_after_a_snapshot_was_read() -> None:
    """Snapshot first, then the graph: the gradient is that of the current values."""
    net, snapshots = model()
    x = torch.randn(5, 3)
    snapshots.take("old")
    fill(net, 0.5)
    with torch.no_grad(), snapshots.use("old"):
        net(x)
    net(x).sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, net.parameters(), strict=True))
    with snapshots.use("old"):
        assert torch.is_grad_enabled()  # use() swaps values and nothing else


@given(st.floats(0, 1), st.floats(-5, 5), st.floats(-5, 5))
def test_blend(decay: float, start: float, now: float) -> None:
    net, snapshots = model()
    fill(net, start)
    snapshots.blend("ema", decay)  # the first one takes
    fill(net, now)
    snapshots.blend("ema", decay)
    expected = decay * start + (1 - decay) * now
    for copy in snapshots.copies["ema"].values():
        torch.testing.assert_close(copy, torch.full_like(copy, expected), rtol=1e-5, atol=1e-5)


def test_unknown_names_and_misfits_are_user_errors() -> None:
    net, snapshots = model()
    snapshots.take("old")
    with pytest.raises(UserError, match=r"'ref'.*old"), snapshots.use("ref"):
        pass
    good = {key: p.detach().clone() for key, p in net.named_parameters()}
    for bad in (
        {k: v for k, v in good.items() if k != "0.bias"},
        good | {"extra": torch.zeros(1)},
        good | {"0.bias": torch.zeros(1)},  # would broadcast without a word
        good | {"0.weight": torch.zeros(3, 4)},
    ):
        with pytest.raises(UserError, match=r"fit|shape") as error:
            snapshots.load("ref", bad)
        assert "\n" not in str(error.value)
        assert "ref" not in snapshots.copies
    snapshots.load("ref", good)
    good["0.bias"].fill_(7.0)  # a copy, not an alias
    assert not (snapshots.copies["ref"]["0.bias"] == 7.0).any()
    with pytest.raises(UserError, match="tune.targets"):
        Snapshots({})
