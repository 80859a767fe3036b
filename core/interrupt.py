"""Ctrl-C that lets work finish once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def first_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT calls ``act``; the next one does what it did before. Outside the main thread: nothing."""

    def handle(signum: int, frame: object) -> None:
        signal.signal(signum, before)
        act()

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
