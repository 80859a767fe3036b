"""Checkpoints that are either whole or not there: written aside, manifest last, renamed into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import UserError

PREFIX = "iteration_"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Replace a text file so that a reader sees the old or the new content, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


def save(
    root: Path, iteration: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write ``root/iteration_<n>``: one safetensors file per entry of ``tensors``, the rest in ``state.pt``.

    state: what torch.save takes and torch.load(weights_only=True) gives back. Afterwards all but the newest ``keep``
    checkpoints up to this one are removed; newer ones (damaged, or of a run that was rewound) neither count nor go.
    Raises UserError when the disk is full, leaving the earlier checkpoints untouched.
    """
    final = root / f"{PREFIX}{iteration:06d}"
    aside, replaced = root / f".{final.name}.new", root / f".{final.name}.old"
    root.mkdir(parents=True, exist_ok=True)
    _recover(root)
    try:
        aside.mkdir()
        for name, group in tensors.items():
            save_file({k: v.detach().cpu().contiguous() for k, v in group.items()}, aside / f"{name}.safetensors")
        with (aside / "state.pt").open("wb") as f:  # torch's own writer does not say that the disk is full
            torch.save(dict(state), f)
        files = sorted(p for p in aside.iterdir())
        for path in files:
            _sync(path)
        manifest = {"iteration": iteration, "files": {p.name: [p.stat().st_size, _digest(p)] for p in files}}
        write_atomic(aside / "manifest.json", json.dumps(manifest, indent=1))
        _sync(aside)
        if final.exists():
            os.replace(final, replaced)
        os.replace(aside, final)
        _sync(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as error:
        _recover(root)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        # safetensors and torch wrap the system's error in their own types and keep only its text.
        if full or "No space left" in str(error) or "os error 28" in str(error):
            last = latest(root)
            raise UserError(
                f"no space left while saving {final.name} in {root}; the last good checkpoint is "
                f"{last.name if last else 'none'}. Free some space and go on with resume={root.parent}"
            ) from error
        raise
    for old in [folder for folder in _all(root) if folder.name < final.name][max(keep - 1, 0) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _recover(root: Path) -> None:
    """Undo what a save that did not finish left behind, also when its process was killed. For the writer only."""
    for leftover in root.glob(f".{PREFIX}*"):
        final = root / leftover.stem[1:]
        if leftover.suffix == ".old" and not final.exists():
            leftover.rename(final)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _all(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted(root.glob(f"{PREFIX}*"), reverse=True) if root.is_dir() else []


def is_whole(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        files = json.loads((folder / "manifest.json").read_text())["files"]
        return all(
            (folder / n).stat().st_size == size and _digest(folder / n) == sha for n, (size, sha) in files.items()
        )
    return False


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint, or None. Only looks: a run may be saving meanwhile."""
    replaced = sorted(root.glob(f".{PREFIX}*.old"), reverse=True)  # of a process killed between two renames
    return next((folder for folder in [*_all(root), *replaced] if is_whole(folder)), None)


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What :func:`save` was given."""
    tensors = {p.stem: load_file(p) for p in sorted(folder.glob("*.safetensors"))}
    return tensors, torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
