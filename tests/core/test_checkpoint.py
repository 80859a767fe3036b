"""Checkpoints are whole or not there, whatever goes wrong and whenever."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core import checkpoint
from core.errors import UserError
from core.metrics import MetricsLog, read


def content(value: float) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    tensors = {
        "policy": {"a.weight": torch.full((3, 2), value), "b": torch.full((4,), value).bfloat16()},
        "optimizer": {"a.step": torch.tensor(value)},
    }
    return tensors, {"iteration": int(value), "names": ["a", "b"], "rng": torch.arange(5)}


def save(root: Path, iteration: int, value: float | None = None, **options: int) -> Path:
    return checkpoint.save(root, iteration, *content(iteration if value is None else value), **options)


def check(folder: Path | None, value: float) -> None:
    """The folder holds exactly content(value)."""
    assert folder is not None
    tensors, state = checkpoint.load(folder)
    expected, expected_state = content(value)
    assert tensors.keys() == expected.keys()
    for name, group in expected.items():
        assert tensors[name].keys() == group.keys()
        for key, x in group.items():
            assert tensors[name][key].dtype == x.dtype
            assert torch.equal(tensors[name][key], x)
    assert torch.equal(state.pop("rng"), expected_state.pop("rng"))
    assert state == expected_state


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    folder = save(tmp_path / "new" / "root", 3)
    assert folder.name == "iteration_000003"
    assert checkpoint.latest(folder.parent) == folder
    check(folder, 3)
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None


def test_non_contiguous_and_empty_tensors(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3).T
    tensors, _ = checkpoint.load(checkpoint.save(tmp_path, 1, {"m": {"x": x, "none": torch.zeros(0)}, "empty": {}}, {}))
    assert torch.equal(tensors["m"]["x"], x)
    assert tensors["empty"] == {}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(tmp_path: Path, keep: int) -> None:
    for k in range(1, 6):
        save(tmp_path, k, keep=keep)
    assert names(tmp_path) == [f"iteration_{k:06d}" for k in range(6 - keep, 6)]


# ---- damage ----


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no_manifest": lambda d: (d / "manifest.json").unlink(),
    "half_manifest": lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text()[:40]),
    "empty_manifest": lambda d: (d / "manifest.json").write_text(""),
    "foreign_manifest": lambda d: (d / "manifest.json").write_text('{"files": ["policy.safetensors"]}'),
    "list_manifest": lambda d: (d / "manifest.json").write_text("[1, 2]"),
    "null_manifest": lambda d: (d / "manifest.json").write_text("null"),
    "binary_manifest": lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "truncated_tensors": lambda d: truncate(d / "policy.safetensors"),
    "flipped_tensors": lambda d: flip(d / "optimizer.safetensors"),
    "missing_tensors": lambda d: (d / "policy.safetensors").unlink(),
    "empty_state": lambda d: (d / "state.pt").write_bytes(b""),
    "flipped_state": lambda d: flip(d / "state.pt"),
    "empty_folder": lambda d: [p.unlink() for p in d.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_chosen(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    good, bad = save(tmp_path, 2), save(tmp_path, 3, keep=3)
    DAMAGES[damage](bad)
    assert checkpoint.latest(tmp_path) == good
    check(good, 2)
    DAMAGES[damage](good)
    check(checkpoint.latest(tmp_path), 1)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_newer_ones_do_not_crowd_out_a_new_save(tmp_path: Path, keep: int) -> None:
    """Resumed from 1 because 2 and 3 are damaged: what is saved next must stay, and win."""
    for k in (1, 2, 3):
        save(tmp_path, k, keep=3)
    for k in (2, 3):
        (tmp_path / f"iteration_{k:06d}" / "state.pt").unlink()
    check(checkpoint.latest(tmp_path), 1)
    save(tmp_path, 2, value=20, keep=keep)
    check(checkpoint.latest(tmp_path), 20)
    save(tmp_path, 3, value=30, keep=keep)
    check(checkpoint.latest(tmp_path), 30)
    save(tmp_path, 4, keep=keep)
    assert len(names(tmp_path)) == keep


# ---- crashes ----


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


def crash_at(monkeypatch: pytest.MonkeyPatch, where: str, call: int, error: BaseException, *, after: bool) -> list[int]:
    """Make the call-th call of a function raise, before or after its work; -> how often it was called."""
    module, name = {
        "save_file": (checkpoint, "save_file"), "torch.save": (torch, "save"), "fsync": (os, "fsync"),
        "replace": (os, "replace"), "write_atomic": (checkpoint, "write_atomic"),
    }[where]  # fmt: skip
    original, count = getattr(module, name), [0]

    def crashing(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == call and not after:
            raise error
        out = original(*args, **kwargs)
        if count[0] == call:
            raise error
        return out

    monkeypatch.setattr(module, name, crashing)
    return count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "broken disk")], ids=["killed", "error"])
@pytest.mark.parametrize("iteration", [1, 2], ids=["same_number", "next_number"])
@pytest.mark.parametrize("where", ["save_file", "torch.save", "fsync", "replace", "write_atomic"])
def test_a_crash_at_any_step_loses_nothing(
    tmp_path: Path, where: str, iteration: int, error: BaseException, after: bool
) -> None:
    """With keep = 1, so that there is exactly one earlier checkpoint to lose."""
    for call in range(1, 20):
        root = tmp_path / str(call)
        save(root, 1, value=10, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            count = crash_at(patch, where, call, error, after=after)
            try:
                save(root, iteration, value=20, keep=1)
                finished = True
            except (Killed, OSError):
                finished = False
        found = checkpoint.latest(root)
        assert found is not None, f"nothing left after a crash in call {call} of {where}"
        value = int(checkpoint.load(found)[1]["iteration"])
        assert value == 20 if finished else value in (10, 20)
        check(found, value)
        save(root, 3, keep=1)  # and life goes on, with no leftovers
        check(checkpoint.latest(root), 3)
        assert names(root) == ["iteration_000003"]
        if finished:
            assert count[0] < call
            return
    pytest.fail(f"{where} is called more often than expected")


def test_a_failed_first_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at(monkeypatch, "write_atomic", 1, ValueError("no"), after=False)
    with pytest.raises(ValueError, match="no"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


# ---- a full disk ----


class SafetensorError(Exception):
    """safetensors' own type: only the text of the system's error survives."""


FULL = [
    ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    ("save_file", OSError(errno.EDQUOT, "quota")),
    ("torch.save", OSError(errno.ENOSPC, "No space left on device")),
    ("fsync", OSError(errno.ENOSPC, "No space left on device")),
    ("write_atomic", OSError(errno.ENOSPC, "No space left on device")),
    ("replace", OSError(errno.ENOSPC, "No space left on device")),
]


@pytest.mark.parametrize(("where", "error"), FULL, ids=[where for where, _ in FULL])
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    save(tmp_path, 1)
    crash_at(monkeypatch, where, 1, error, after=False)
    with pytest.raises(UserError, match=r"no space left.*iteration_000002.*iteration_000001.*resume=") as caught:
        save(tmp_path, 2)
    assert "\n" not in str(caught.value)
    check(checkpoint.latest(tmp_path), 1)
    assert names(tmp_path) == ["iteration_000001"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_disk_that_fills_up_while_the_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The real error: state.pt leads to a device that is always full. torch's own file writer hides the cause."""
    original = checkpoint.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        original(tensors, path)
        if not path.with_name("state.pt").is_symlink():
            path.with_name("state.pt").symlink_to("/dev/full")

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(UserError, match="no space left"):
        checkpoint.save(tmp_path, 2, content(2)[0], {"big": torch.zeros(size)})
    check(checkpoint.latest(tmp_path), 1)


# ---- text files ----


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_write_atomic_shows_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "x.json"
    checkpoint.write_atomic(path, "old")
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, where, 1, Killed(), after=False)
        with pytest.raises(Killed):
            checkpoint.write_atomic(path, "new")
    assert path.read_text() == "old"
    checkpoint.write_atomic(path, "new")
    assert names(tmp_path) == ["x.json"]
    assert path.read_text() == "new"


def test_metrics_survive_a_write_cut_anywhere(tmp_path: Path) -> None:
    """Whatever part of the last line reached the disk, a resume drops it and keeps every whole line before."""
    log, path = MetricsLog(tmp_path), tmp_path / "metrics.jsonl"
    for k in range(3):
        log.write(k, {"reward/mean": k / 3, "bad": float("nan")}, {"seconds/total": 1.0})
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    assert json.loads(lines[2]) == {"iteration": 2, "reward/mean": 2 / 3, "bad": None}
    for cut in range(len(lines[2])):
        path.write_text("".join(lines[:2]) + lines[2][:cut])
        log.rewind(2)
        assert path.read_text() == "".join(lines[:2])
    path.write_text(whole[:-1])  # only the newline is missing
    log.rewind(3)
    assert path.read_text() == whole
    log.rewind(1)
    assert [row["iteration"] for row in read(path)] == [0]
    assert [row["iteration"] for row in read(tmp_path / "timings.jsonl")] == [0]
