"""Named random streams: a generator is a pure function of the seed and of what it is for.

So the same seed gives the same run on one process or several, before and after a resume: there is no position to save.
Generators live on the CPU, as diffusers' do, so that a run does not depend on the device's random numbers.
"""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``seed_for(0, "rollout", iteration, group, member)``."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, *names))
