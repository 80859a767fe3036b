"""Prompts and shares: pure functions of the iteration number, for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data import GroupSampler
from core.errors import UserError

sizes = st.integers(1, 30)


@given(sizes, sizes, st.integers(0, 2**31), st.integers(0, 3))
def test_every_epoch_visits_each_prompt_once(n_requests: int, prompts: int, seed: int, epoch: int) -> None:
    sampler = GroupSampler(n_requests, prompts, 2, seed)
    last = -(-(epoch + 1) * n_requests // prompts)
    visited = [r for iteration in range(last) for r in sampler.requests(iteration)]
    assert sorted(visited[epoch * n_requests : (epoch + 1) * n_requests]) == list(range(n_requests))
    assert all(len(sampler.requests(k)) == prompts for k in range(last))


@given(sizes, sizes, st.integers(2, 24), st.integers(1, 40))
def test_shares_partition_the_batch(n_requests: int, prompts: int, group_size: int, n_processes: int) -> None:
    sampler = GroupSampler(n_requests, prompts, group_size, 0)
    assert sampler.batch == prompts * group_size
    if n_processes > sampler.batch:
        with pytest.raises(UserError, match="fewer processes") as error:
            sampler.share(0, n_processes)
        nearest = int(str(error.value).split("train.prompts >= ")[1].split()[0])
        assert len(GroupSampler(n_requests, nearest, group_size, 0).share(n_processes - 1, n_processes)) >= 1
        assert (nearest - 1) * group_size < n_processes  # nothing smaller would do
        return
    shares = [sampler.share(k, n_processes) for k in range(n_processes)]
    assert [i for share in shares for i in share] == list(range(sampler.batch))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


@given(sizes, sizes, st.integers(0, 100), st.integers(0, 2**31))
def test_nothing_is_remembered(n_requests: int, prompts: int, iteration: int, seed: int) -> None:
    """An iteration's prompts do not depend on which iterations were asked for before, so a resume needs no position."""
    used = GroupSampler(n_requests, prompts, 2, seed)
    for k in (3, 0, iteration + 1):
        used.requests(k)
    assert used.requests(iteration) == GroupSampler(n_requests, prompts, 2, seed).requests(iteration)


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {tuple(GroupSampler(50, 50, 2, seed).requests(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 1, 2), "data.prompts"), ((5, 0, 2), "1 or more"), ((5, 1, 1), "nearest legal value is 2"),
    ((5, 1, 0), "nearest legal value is 2"),
])  # fmt: skip
def test_errors_name_the_nearest_legal_choice(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        GroupSampler(*arguments, seed=0)
    assert "\n" not in str(error.value)
