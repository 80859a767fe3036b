"""Scenes of coloured shapes: prompts in the manner of GenEval, a renderer, and an exact verifier.

A scene is drawn on 32x32 pixels: a 4x4 grid of 8 px cells, at most one object in a cell, four shapes in four
colours on a plain background. The verifier reads objects back from pixels, so it needs no model and
can be wrong only where the picture itself is unclear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import ndimage

from core.errors import UserError
from core.rewards import RewardResult, ScoreSpec
from core.types import Request, Sample

SIZE, GRID, CELL = 32, 4, 8
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (230, 30, 30), "green": (20, 215, 60), "blue": (40, 70, 230), "yellow": (250, 210, 20)}
BACKGROUND = (255, 255, 255)
COUNTS = {1: "a", 2: "two", 3: "three", 4: "four", 5: "five"}
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
TAGS = ("single_object", "colors", "counting", "two_object", "color_attr", "position")

MASKS = {
    name: np.array([[char == "#" for char in row] for row in rows.split()])
    for name, rows in {
        "circle": "..###.. .#####. ####### ####### ####### .#####. ..###..",
        "square": "####### ####### ####### ####### ####### ####### #######",
        "triangle": "...#... ...#... ..###.. ..###.. .#####. .#####. #######",
        "cross": "##...## ###.### .#####. ..###.. .#####. ###.### ##...##",
    }.items()
}
EXTENT = 7  # pixels a shape is wide and high, so it has two places along each side of its cell


@dataclass(frozen=True)
class Clause:
    """`count` objects of one shape; a colour of None leaves each object's colour free."""

    shape: str
    colour: str | None = None
    count: int = 1

    @property
    def text(self) -> str:
        noun = self.shape if self.count == 1 else self.shape + ("es" if self.shape.endswith("s") else "s")
        return " ".join(word for word in (COUNTS[self.count], self.colour, noun) if word)


@dataclass(frozen=True)
class Scene:
    """What a prompt asks for: one or two clauses, and where the first stands relative to the second."""

    tag: str
    clauses: tuple[Clause, ...]
    relation: str | None = None

    @property
    def prompt(self) -> str:
        return f" {self.relation or 'and'} ".join(clause.text for clause in self.clauses)

    @property
    def meta(self) -> dict[str, Any]:
        """The scene as plain JSON values; `Scene.from_meta` reads it back."""
        clauses = [{"shape": c.shape, "colour": c.colour, "count": c.count} for c in self.clauses]
        return {"tag": self.tag, "clauses": clauses, "relation": self.relation}

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Scene:
        return cls(meta["tag"], tuple(Clause(**clause) for clause in meta["clauses"]), meta["relation"])

    @property
    def wanted(self) -> list[tuple[str, str | None]]:
        """(shape, colour or None) of every object asked for."""
        return [(clause.shape, clause.colour) for clause in self.clauses for _ in range(clause.count)]


@dataclass(frozen=True)
class Detected:
    """An object seen in an image: its shape (None: no shape of ours), colour and centroid in pixels."""

    shape: str | None
    colour: str
    x: float
    y: float


def all_prompts() -> dict[str, list[Scene]]:
    """Every scene of the grammar by tag, 1,280 in all."""
    things = [Clause(shape, colour) for colour in COLOURS for shape in SHAPES]
    pairs = [(a, b) for a in things for b in things if a != b]
    return {
        "single_object": [Scene("single_object", (Clause(shape),)) for shape in SHAPES],
        "colors": [Scene("colors", (thing,)) for thing in things],
        "counting": [
            Scene("counting", (Clause(thing.shape, thing.colour, count),)) for count in (2, 3, 4) for thing in things
        ],
        "two_object": [Scene("two_object", (Clause(a), Clause(b))) for a in SHAPES for b in SHAPES if a != b],
        "color_attr": [Scene("color_attr", pair) for pair in pairs],
        "position": [Scene("position", pair, relation) for relation in RELATIONS for pair in pairs],
    }


def split(seed: int = 0) -> tuple[dict[str, list[Scene]], dict[str, list[Scene]]]:
    """Scenes by tag for training, and an eighth of every tag (at least one scene) held out."""
    rng = np.random.default_rng(seed)
    train: dict[str, list[Scene]] = {}
    heldout: dict[str, list[Scene]] = {}
    for tag, scenes in all_prompts().items():
        order = rng.permutation(len(scenes))
        n = max(1, len(scenes) // 8)
        heldout[tag] = [scenes[i] for i in sorted(order[:n])]
        train[tag] = [scenes[i] for i in sorted(order[n:])]
    return train, heldout


_BY_PROMPT = {scene.prompt: scene for scenes in all_prompts().values() for scene in scenes}


def parse(prompt: str) -> Scene:
    """The scene that a prompt of the grammar asks for."""
    scene = _BY_PROMPT.get(" ".join(prompt.lower().split()))
    if scene is None:
        raise ValueError(f"not a prompt of the scene grammar: {prompt!r}")
    return scene


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """A random picture that satisfies `scene`: uint8 [32, 32, 3]. What the prompt leaves open is drawn at random."""
    names = tuple(COLOURS)
    wanted = scene.wanted
    while True:
        cells = rng.choice(GRID * GRID, size=len(wanted), replace=False)
        x, y = cells % GRID, cells // GRID
        if scene.relation is not None:
            dx, dy = RELATIONS[scene.relation]
            if (x[0] - x[1]) * dx + (y[0] - y[1]) * dy <= 0:
                continue
        jitter = rng.integers(CELL - EXTENT + 1, size=(2, len(wanted)))
        left, top = x * CELL + jitter[0], y * CELL + jitter[1]
        colours = [colour or names[rng.integers(len(names))] for _, colour in wanted]
        if not _touching(left, top, colours):
            break
    image = np.empty((SIZE, SIZE, 3), np.uint8)
    image[:] = BACKGROUND
    for (shape, _), colour, x0, y0 in zip(wanted, colours, left, top, strict=True):
        image[y0 : y0 + EXTENT, x0 : x0 + EXTENT][MASKS[shape]] = COLOURS[colour]
    return image


def _touching(left: np.ndarray, top: np.ndarray, colours: list[str]) -> bool:
    return any(
        colours[i] == colours[j] and abs(left[i] - left[j]) <= EXTENT and abs(top[i] - top[j]) <= EXTENT
        for i in range(len(colours))
        for j in range(i)
    )


# Objects are told from the background by chroma (colour less its own grey), so that a blurred edge, a blend of an
# object and white or dark, keeps the object's hue instead of falling to a third colour.
_PALETTE = np.array([(0, 0, 0), *COLOURS.values()], np.float32)
_CHROMA = _PALETTE - _PALETTE.mean(1, keepdims=True)
_MIN_AREA = 6  # smaller specks are noise, larger ones count as objects
_MIN_IOU = 0.65
_WINDOW = 11


def _templates() -> np.ndarray:
    """Every shape at every offset up to one pixel: [shapes * 9, window * window]."""
    stack = []
    for shape in SHAPES:
        for dy in range(3):
            for dx in range(3):
                canvas = np.zeros((_WINDOW, _WINDOW), np.float32)
                canvas[1 + dy : 1 + dy + EXTENT, 1 + dx : 1 + dx + EXTENT] = MASKS[shape]
                stack.append(canvas.ravel())
    return np.stack(stack)


_TEMPLATES = _templates()
_TEMPLATE_AREA = _TEMPLATES.sum(1)


def detect(image: np.ndarray) -> list[Detected]:
    """The objects in a picture, uint8 [32, 32, 3]: nearest palette colour, connected components, template match."""
    pixels = image.reshape(-1, 3).astype(np.float32)
    pixels -= pixels.mean(1, keepdims=True)
    distance = (_CHROMA**2).sum(1) - 2 * pixels @ _CHROMA.T
    nearest = distance.argmin(1).reshape(image.shape[:2])
    found = []
    for index, colour in enumerate(COLOURS, start=1):
        mask = nearest == index
        if np.count_nonzero(mask) < _MIN_AREA:
            continue
        labels, n = ndimage.label(mask)
        for label, (rows, columns) in enumerate(ndimage.find_objects(labels, n), start=1):
            part = labels[rows, columns] == label
            if np.count_nonzero(part) >= _MIN_AREA:
                ys, xs = np.nonzero(part)
                x, y = float(xs.mean() + columns.start), float(ys.mean() + rows.start)
                found.append(Detected(_shape(part), colour, x, y))
    return found


def _shape(part: np.ndarray) -> str | None:
    """The shape whose template overlaps a component's mask best, or None if none overlaps it well."""
    height, width = part.shape
    if max(height, width) > _WINDOW:
        return None
    # Noise may hang a stray pixel on a shape, so templates are tried at offsets around the box's middle.
    canvas = np.zeros((_WINDOW, _WINDOW), np.float32)
    top, left = (_WINDOW - height) // 2, (_WINDOW - width) // 2
    canvas[top : top + height, left : left + width] = part
    overlap = _TEMPLATES @ canvas.ravel()
    iou = overlap / (_TEMPLATE_AREA + canvas.sum() - overlap)
    best = int(iou.argmax())
    return SHAPES[best // 9] if iou[best] >= _MIN_IOU else None


def verify(image: np.ndarray, scene: Scene) -> dict[str, Any]:
    """Does a picture show exactly what `scene` asks for?

    `found` is the share of wanted objects that are there; `count`, `colours` and `relation` tell what failed;
    `correct` needs every wanted object with its attributes and relation, and no other object.
    """
    objects = detect(image)
    wanted = scene.wanted
    rest = list(objects)
    matched: list[Detected | None] = []
    for shape, colour in wanted:
        hit = next((o for o in rest if o.shape == shape and colour in (None, o.colour)), None)
        if hit is not None:
            rest.remove(hit)
        matched.append(hit)
    found = sum(hit is not None for hit in matched) / len(wanted)
    count = len(objects) == len(wanted)
    named = Counter(colour for _, colour in wanted if colour is not None)
    colours = not named - Counter(o.colour for o in objects)
    relation = True
    if scene.relation is not None:
        (dx, dy), (a, b) = RELATIONS[scene.relation], matched
        relation = a is not None and b is not None and (a.x - b.x) * dx + (a.y - b.y) * dy >= CELL / 2
    correct = bool(found == 1 and count and relation)
    return {"correct": correct, "found": found, "count": count, "colours": colours, "relation": relation}


class SceneReward:
    """Scores pictures of scenes: `scene` rewards partial success, `scene_correct` is the exact verdict."""

    scope = "sample"
    needs = frozenset({"image"})
    scores = (ScoreSpec("scene", 0.0, 1.0), ScoreSpec("scene_correct", 0.0, 1.0, teaches=False))

    def __init__(self, correct_weight: float = 0.7, found_weight: float = 0.3) -> None:
        if correct_weight < 0 or found_weight < 0 or abs(correct_weight + found_weight - 1) > 1e-6:
            raise ValueError(f"weights must be non-negative and sum to 1, got {correct_weight} and {found_weight}")
        self.correct_weight, self.found_weight = correct_weight, found_weight

    def check(self, requests: Sequence[Request]) -> None:
        """Raises UserError for a prompt outside the grammar: it could never be scored."""
        for request in requests:
            try:
                parse(str(request.inputs.get("prompt")))
            except ValueError as error:
                raise UserError(f"reward 'scene': {error}; use data.prompts=scenes, or another reward") from error

    def score(
        self, samples: Sequence[Sample], requests: Sequence[Request], group: torch.Tensor | None = None
    ) -> RewardResult:
        """`samples[i]` against `requests[i]`; scores and validity are [B]. `group` is not needed."""
        shaped, correct = np.zeros(len(samples), np.float32), np.zeros(len(samples), np.float32)
        valid = np.zeros(len(samples), bool)
        details: list[dict[str, Any]] = [{} for _ in samples]
        for i, (sample, request) in enumerate(zip(samples, requests, strict=True)):
            scene = parse(request.inputs["prompt"])
            image = sample.parts.get("image") if sample.ok else None
            if image is None:
                details[i] = {"reason": "no image"}
            elif tuple(image.shape) != (SIZE, SIZE, 3):
                details[i] = {"reason": f"image is {tuple(image.shape)}, scenes are {(SIZE, SIZE, 3)}"}
            else:
                verdict = verify(image.cpu().numpy(), scene)
                details[i], valid[i] = verdict, True
                correct[i] = verdict["correct"]
                shaped[i] = self.correct_weight * verdict["correct"] + self.found_weight * verdict["found"]
        ok = torch.from_numpy(valid)
        return RewardResult(
            scores={"scene": torch.from_numpy(shaped), "scene_correct": torch.from_numpy(correct)},
            valid={"scene": ok, "scene_correct": ok.clone()},
            details=details,
        )
