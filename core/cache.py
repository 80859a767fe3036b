"""Conditionings encoded once and kept on disk, one small file a request, so that encoders can be let go."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from core.adapter import Adapter
from core.types import Conditioning, Request


class ConditioningCache:
    """Encodes what is missing, then serves from disk with the most recent ``in_memory`` requests kept in memory."""

    def __init__(self, adapter: Adapter, folder: Path, in_memory: int = 2048) -> None:
        self.adapter, self.folder, self.in_memory = adapter, folder, in_memory
        self.recent: OrderedDict[str, Conditioning] = OrderedDict()
        folder.mkdir(parents=True, exist_ok=True)

    def key(self, request: Request) -> str:
        """Everything the encoding depends on: the encoders, the inputs, the geometry."""
        facts = [self.adapter.fingerprint(), dict(request.inputs), dict(request.geometry)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def prepare(self, requests: Sequence[Request], batch: int = 16) -> int:
        """Encode and store the requests that are not there yet; -> how many were encoded."""
        missing = {key: r for r in requests if not self._path(key := self.key(r)).exists()}
        items = list(missing.items())
        for start in range(0, len(items), batch):
            part = items[start : start + batch]
            cond = self.adapter.encode([request for _, request in part]).to("cpu")
            for row, (key, _) in enumerate(part):
                tensors = {name: x[row : row + 1].contiguous().clone() for name, x in cond.tensors.items()}
                path = self._path(key)
                aside = path.with_name(f".{path.name}.{os.getpid()}")
                save_file(tensors, aside)
                os.replace(aside, path)
        return len(items)

    def get(self, requests: Sequence[Request]) -> Conditioning:
        """One batch, on the adapter's device."""
        return Conditioning.collate([self._one(r) for r in requests]).to(self.adapter.device)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _one(self, request: Request) -> Conditioning:
        key = self.key(request)
        if key not in self.recent:
            self.recent[key] = Conditioning(load_file(self._path(key)), (dict(request.geometry),))
            if len(self.recent) > self.in_memory:
                self.recent.popitem(last=False)
        self.recent.move_to_end(key)
        return self.recent[key]
