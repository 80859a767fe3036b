"""The size of an image as JPEG: the cheapest true reward, for checks and demonstrations (DDPO, arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from core.errors import UserError
from core.rewards import RewardResult, ScoreSpec
from core.types import Request, Sample


class JpegSize:
    """Score "jpeg_size": minus the kilobytes (1000 bytes) of the image as JPEG; with ``larger`` plus."""

    scope: Literal["sample"] = "sample"
    needs = frozenset({"image"})

    def __init__(self, larger: bool = False, quality: int = 95) -> None:
        if not 1 <= quality <= 100:
            raise UserError(f"JPEG quality {quality} is outside 1..100; the usual value is 95")
        self.larger, self.quality = larger, quality
        self.scores = (ScoreSpec("jpeg_size", 0.0, 1000.0) if larger else ScoreSpec("jpeg_size", -1000.0, 0.0),)

    def kilobytes(self, image: Tensor) -> float:
        """image: uint8 [H, W, 3]."""
        buffer = io.BytesIO()
        Image.fromarray(image.cpu().numpy()).save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        ok = torch.tensor([sample.ok for sample in samples], dtype=torch.bool)
        sign = 1.0 if self.larger else -1.0
        values = [sign * self.kilobytes(s.parts["image"]) if s.ok else float("nan") for s in samples]
        return RewardResult({"jpeg_size": torch.tensor(values, dtype=torch.float32)}, {"jpeg_size": ok})
