"""Pictures in a grid, each with its prompt beneath it and a mark where a verifier has judged it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

INK, PAPER, GREY, LINE = (31, 41, 55), (255, 255, 255), (236, 239, 243), (203, 209, 217)
RIGHT, WRONG = (22, 163, 74), (220, 38, 38)
MAX_LINES = 4


def image_grid(
    images: Sequence[Tensor | None],
    captions: Sequence[str],
    marks: Sequence[bool | None],
    columns: int,
    cell: int = 96,
) -> Image.Image:
    """One picture a cell of ``cell`` pixels, its caption wrapped beneath it.

    images: uint8 [H, W, 3], or None where there is none (a grey box with a cross). marks: True = verified right
    (green), False = wrong (red), None = not judged. Small pictures grow by whole factors, so that pixels stay square.
    """
    if not images or len(images) != len(captions) or len(images) != len(marks):
        raise ValueError(f"a grid of {len(images)} images needs as many captions and marks, and at least one")
    if columns < 1 or cell < 16:
        raise ValueError(f"columns {columns} must be 1 or more and cell {cell} 16 or more")
    font = ImageFont.load_default(max(10, round(cell / 8)))
    ascent, descent = font.getmetrics()
    height, gap = ascent + descent + 1, max(6, cell // 8)
    columns = min(columns, len(images))
    texts = [_wrap(caption, font, cell) for caption in captions]
    rows = [range(start, min(start + columns, len(images))) for start in range(0, len(images), columns)]
    heights = [cell + gap // 2 + height * max(len(texts[i]) for i in row) for row in rows]
    grid = Image.new("RGB", (columns * (cell + gap) + gap, sum(heights) + gap * (len(rows) + 1)), PAPER)
    draw = ImageDraw.Draw(grid)
    y = gap
    for row, tall in zip(rows, heights, strict=True):
        for x, i in zip(range(gap, grid.width, cell + gap), row, strict=False):
            grid.paste(_tile(images[i], marks[i], cell), (x, y))
            if marks[i] is not None:
                badge = _badge(marks[i], cell // 6)
                grid.paste(badge, (x + cell - badge.width + gap // 3, y - gap // 3), badge)
            for k, line in enumerate(texts[i]):
                draw.text((x + cell / 2, y + cell + gap // 2 + k * height), line, INK, font, anchor="ma")
        y += tall + gap
    return grid


def save_png(image: Image.Image, path: Path) -> None:
    """Write a PNG so that a reader sees the old or the new file, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as f:
            image.save(f, format="PNG", optimize=True)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _tile(image: Tensor | None, mark: bool | None, cell: int) -> Image.Image:
    tile = Image.new("RGB", (cell, cell), GREY)
    if image is None:
        cross = _smooth(cell, lambda draw, size: _cross(draw, (0.3 * size, 0.7 * size), LINE, size // 24))
        tile.paste(cross, (0, 0), cross)
    else:
        picture = _fit(image, cell)
        tile.paste(picture, ((cell - picture.width) // 2, (cell - picture.height) // 2))
    colour, width = (LINE, 1) if mark is None else (RIGHT if mark else WRONG, 2)
    ImageDraw.Draw(tile).rectangle((0, 0, cell - 1, cell - 1), outline=colour, width=width)
    return tile


def _fit(image: Tensor, cell: int) -> Image.Image:
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        raise ValueError(f"a picture must be uint8 [H, W, 3], not {image.dtype} {list(image.shape)}")
    picture = Image.fromarray(image.cpu().contiguous().numpy())
    longest = max(picture.size)
    if longest <= cell:
        factor = cell // longest
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    size = (max(1, round(picture.width * cell / longest)), max(1, round(picture.height * cell / longest)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _smooth(size: int, paint: Callable[[ImageDraw.ImageDraw, int], None]) -> Image.Image:
    """Paint on a large transparent square and shrink it, because PIL draws shapes without anti-aliasing."""
    layer = Image.new("RGBA", (4 * size, 4 * size))
    paint(ImageDraw.Draw(layer), 4 * size)
    return layer.resize((size, size), Image.Resampling.BOX)


def _badge(mark: bool, size: int) -> Image.Image:
    """A disc with a tick or a cross; it sits on a picture's corner, where it hides next to nothing."""

    def paint(draw: ImageDraw.ImageDraw, side: int) -> None:
        draw.ellipse((0, 0, side - 1, side - 1), fill=PAPER)
        draw.ellipse((side * 0.08, side * 0.08, side * 0.92, side * 0.92), fill=RIGHT if mark else WRONG)
        if mark:
            tick = [(0.3 * side, 0.51 * side), (0.45 * side, 0.66 * side), (0.71 * side, 0.35 * side)]
            draw.line(tick, fill=PAPER, width=side // 8, joint="curve")
        else:
            _cross(draw, (0.35 * side, 0.65 * side), PAPER, side // 8)

    return _smooth(size, paint)


def _cross(draw: ImageDraw.ImageDraw, span: tuple[float, float], colour: tuple[int, int, int], width: int) -> None:
    low, high = span
    draw.line((low, low, high, high), fill=colour, width=width)
    draw.line((low, high, high, low), fill=colour, width=width)


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines no wider than ``width``: broken at spaces, inside a word only if it is too long; at most MAX_LINES."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while font.getlength(word) > width and len(word) > 1:
            cut = next(n for n in range(len(word) - 1, 0, -1) if n == 1 or font.getlength(word[:n]) <= width)
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    if len(lines) > MAX_LINES:
        last = lines[MAX_LINES - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: MAX_LINES - 1], last.rstrip() + "…"]
    return lines
