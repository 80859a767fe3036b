"""The documentation's figures, drawn from code: ``python docs/figures/make_figures.py`` writes them beside itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from rewards.scenes import Clause, Scene, render  # noqa: E402

INK, MUTED, LINE, PAPER = "#111827", "#64748b", "#475569", "#ffffff"
BLUE, GREEN, RED = "#2563eb", "#16a34a", "#dc2626"
FILL = {"plain": ("#f8fafc", "#cbd5e1"), "network": ("#eff6ff", BLUE), "maths": ("#fffbeb", "#d97706")}
STRATA = ("#2563eb", "#7c3aed", "#db2777", "#ea580c")
MINUS = "\N{MINUS SIGN}"
WIDTH, HEIGHT = 1280, 790


class Canvas:
    """A drawing in pixels, y downwards."""

    def __init__(self, width: int, height: int) -> None:
        self.figure = Figure(figsize=(width / 100, height / 100), facecolor=PAPER)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float = 11, **style: object) -> None:
        self.axes.text(x, y, text, fontsize=size, **({"ha": "center", "va": "center", "color": INK} | style))

    def box(self, x: float, y: float, w: float, h: float, kind: str = "plain") -> None:
        face, edge = FILL[kind]
        shape = FancyBboxPatch((x, y), w, h, "round,pad=0,rounding_size=10", facecolor=face, edgecolor=edge, lw=1.4)
        self.axes.add_patch(shape)

    def arrow(self, *points: tuple[float, float], colour: str = LINE, dashed: bool = False, width: float = 1.6) -> None:
        """A line through the points with a head at the last."""
        style = (0, (5, 4)) if dashed else "solid"
        if len(points) > 2:
            self.axes.plot(*zip(*points[:-1], strict=True), color=colour, lw=width, ls=style, solid_capstyle="round")
        self.axes.add_patch(
            FancyArrowPatch(
                points[-2], points[-1], arrowstyle="-|>,head_length=5,head_width=2.6", shrinkA=0, shrinkB=0,
                color=colour, lw=width, ls=style, mutation_scale=1.3,
            )
        )  # fmt: skip

    def picture(self, x: float, y: float, size: float, pixels: np.ndarray, edge: str = "#94a3b8") -> None:
        """The picture's centre is (x, y)."""
        half = size / 2
        extent = (x - half, x + half, y + half, y - half)
        self.axes.imshow(pixels, extent=extent, interpolation="nearest", aspect="auto", zorder=2)
        self.axes.add_patch(Rectangle((x - half, y - half), size, size, fill=False, edgecolor=edge, lw=1.2, zorder=3))

    def save(self, path: Path) -> None:
        settings = {"svg.hashsalt": path.stem, "svg.fonttype": "path", "mathtext.fontset": "dejavusans"}
        with mpl.rc_context(settings):
            self.figure.savefig(path, dpi=200, metadata={"Date": None, "Creator": None})


def _stage(canvas: Canvas, y: float, number: int, title: str, note: str) -> None:
    canvas.axes.add_patch(Circle((40, y), 14, facecolor=BLUE, edgecolor="none"))
    canvas.text(40, y + 0.5, str(number), 12, color=PAPER, weight="bold")
    canvas.text(64, y, title, 14, ha="left", weight="bold")
    canvas.text(76 + 11.5 * len(title), y + 1, note, 11, ha="left", color=MUTED)


def _heading(canvas: Canvas, x: float, y: float, title: str, symbol: str = "") -> None:
    canvas.text(x, y, f"{title}  {symbol}".strip(), 11, color=MUTED)


def _samples(rng: np.random.Generator) -> list[np.ndarray]:
    """Four attempts at one prompt: right, wrong colour, wrong relation, right; on one background."""
    circle, square = Clause("circle", "red"), Clause("square", "blue")
    scenes = [
        Scene("position", (circle, square), "above"),
        Scene("position", (circle, Clause("square", "yellow")), "above"),
        Scene("position", (circle, square), "below"),
        Scene("position", (circle, square), "above"),
    ]
    drawn = []
    for scene in scenes:
        while (image := render(scene, rng))[0, 0].min() < 128 and image[-1, -1].min() < 128:
            pass
        drawn.append(image / 255)
    return drawn


def how_it_works() -> Canvas:
    """One V-GRPO iteration: what is sampled, what is shared, what is differentiated."""
    rng = np.random.default_rng(4)
    samples = _samples(rng)
    scores = np.array([1.0, 0.15, 0.3, 1.0])
    advantages = (scores - scores.mean()) / scores.std()
    noises = [rng.random((32, 32, 3)) for _ in samples]
    pair_noises = [np.clip(0.5 + 0.28 * rng.standard_normal((32, 32, 3)), 0, 1) for _ in STRATA]
    times = (0.17, 0.36, 0.66, 0.86)
    canvas = Canvas(WIDTH, HEIGHT)

    # ---- rollout ----
    _stage(canvas, 36, 1, "Rollout", "no gradient; any ODE sampler will do")
    lanes = [112 + 58 * i for i in range(4)]
    middle, top = sum(lanes) / 4, 74
    canvas.box(24, middle - 46, 162, 92)
    canvas.text(105, middle - 22, "prompt", 11, color=MUTED)
    canvas.text(105, middle + 12, "“a red circle above\na blue square”", 11)
    _heading(canvas, 248, top, "G noises")
    _heading(canvas, 498, top, "samples", "$o_i$")
    canvas.box(305, lanes[0] - 24, 120, lanes[-1] - lanes[0] + 48, "network")
    canvas.text(365, middle - 14, "ODE sampler", 10.5, weight="bold")
    canvas.text(365, middle + 12, "network $\\theta$", 11, color=BLUE)
    canvas.box(575, lanes[0] - 24, 110, lanes[-1] - lanes[0] + 48)
    canvas.text(630, middle - 14, "reward", 12, weight="bold")
    canvas.text(630, middle + 20, "a model\nor a verifier", 10, color=MUTED)
    _heading(canvas, 760, top, "scores", "$R_i$")
    _heading(canvas, 1096, top, "advantages within the group", "$A_i$")
    for y, noise, image, score, advantage in zip(lanes, noises, samples, scores, advantages, strict=True):
        canvas.arrow((187, middle), (204, middle), (204, y), (220, y))
        canvas.picture(248, y, 46, noise)
        canvas.arrow((275, y), (301, y))
        canvas.arrow((426, y), (470, y))
        canvas.picture(498, y, 46, image)
        canvas.arrow((525, y), (571, y))
        canvas.arrow((686, y), (728, y))
        canvas.text(760, y, f"{score:.2f}", 12, family="monospace")
        canvas.arrow((792, y), (950, y))
        colour, length = (GREEN if advantage > 0 else RED), 95 * advantage
        canvas.axes.add_patch(Rectangle((1096, y - 12), length, 24, facecolor=colour, alpha=0.85, edgecolor="none"))
        canvas.text(1096 - 12 * np.sign(advantage), y, f"{advantage:+.1f}".replace("-", MINUS), 11,
                    ha="right" if advantage > 0 else "left", family="monospace")  # fmt: skip
    canvas.axes.plot((1096, 1096), (lanes[0] - 22, lanes[-1] + 22), color=MUTED, lw=1)

    # ---- update ----
    _stage(canvas, 362, 2, "Update", "")
    canvas.text(26, 398, "log-likelihood of a finished sample:\nminus its denoising loss", 11, ha="left", color=MUTED)
    columns = [412 + 57 * j for j in range(4)]
    rows = [502 + 52 * i for i in range(4)]
    centre, header = sum(rows) / 4, 440
    canvas.text(30, 458, "N pairs $(t_j, \\varepsilon_j)$, the same\nfor the whole group", 12, ha="left", weight="bold")
    canvas.text(30, 512, "t: one from each of N equal\nparts of the sampling grid", 10.5, ha="left", color=MUTED)
    for j, (t, colour) in enumerate(zip(times, STRATA, strict=True)):
        canvas.axes.add_patch(Rectangle((30 + 70 * j, 548), 66, 10, facecolor=colour, alpha=0.25, edgecolor="none"))
        canvas.axes.add_patch(Circle((30 + 276 * t, 553), 7, facecolor=colour, edgecolor=PAPER, lw=1.5, zorder=4))
        canvas.text(30 + 276 * t, 574, f"$t_{j + 1}$", 11, color=colour)
    canvas.text(30, 596, "data", 10, ha="left", color=MUTED)
    canvas.text(306, 596, "noise", 10, ha="right", color=MUTED)
    canvas.text(30, 640, "$z_{ij} = (1 - t_j)\\, o_i + t_j\\, \\varepsilon_j$", 13, ha="left")
    for j, (x, noise, t, colour) in enumerate(zip(columns, pair_noises, times, STRATA, strict=True)):
        canvas.picture(x, header, 42, noise, colour)
        canvas.text(x, header - 34, f"$t_{j + 1}, \\varepsilon_{j + 1}$", 11, color=colour)
        for y, image in zip(rows, samples, strict=True):
            canvas.picture(x, y, 44, np.clip((1 - t) * image + t * noise, 0, 1))
    canvas.arrow((columns[0] - 60, header), (columns[0] - 28, header))
    canvas.arrow((498, lanes[-1] + 26), (498, 390))
    canvas.text(510, 340, "clean latents", 10.5, ha="left", color=MUTED)
    canvas.box(660, centre - 60, 106, 120, "network")
    canvas.text(713, centre - 24, "network $\\theta$", 12, weight="bold", color=BLUE)
    canvas.text(713, centre + 14, "$\\hat{o}_{ij} = z_{ij} - t_j\\, v_\\theta$", 10.5)
    canvas.box(806, centre - 60, 188, 120, "maths")
    canvas.text(900, centre - 40, "self-normalised loss", 10.5, weight="bold")
    canvas.text(900, centre + 14, "$\\ell_{ij} = \\frac{\\langle (\\hat{o}_{ij} - o_i)^2 \\rangle}"
                "{\\mathrm{sg}\\,\\langle |\\hat{o}_{ij} - o_i| \\rangle}$", 16)  # fmt: skip
    canvas.box(1020, centre - 78, 240, 156, "maths")
    canvas.text(1140, centre - 56, "ratio and objective", 11, weight="bold")
    canvas.text(
        1142, centre - 16, "$\\rho_i = \\exp\\,\\frac{1}{N}\\sum_j (\\ell^{\\,\\mathrm{old}}_{ij} - \\ell_{ij})$", 12
    )
    canvas.text(1140, centre + 20, "$\\max_\\theta \\; \\min\\,(\\rho_i A_i,\\ \\mathrm{clip}(\\rho_i)\\, A_i)$", 12)
    canvas.text(1140, centre + 54, "with one update $\\rho_i = 1$", 10, color=MUTED)
    canvas.arrow((columns[-1] + 30, centre), (656, centre))
    canvas.arrow((766, centre), (802, centre))
    canvas.arrow((994, centre), (1016, centre))
    canvas.arrow((1140, lanes[-1] + 30), (1140, centre - 82))
    canvas.text(1152, 390, "$A_i$", 13, ha="left")
    canvas.box(806, 722, 188, 48)
    canvas.text(900, 746, "gradient step", 12, weight="bold")
    canvas.arrow((1140, centre + 78), (1140, 746), (998, 746))
    canvas.arrow((806, 746), (713, 746), (713, centre + 64), colour=BLUE)
    canvas.arrow((713, 746), (340, 746), (340, lanes[-1] + 30), colour=BLUE, dashed=True)
    canvas.text(540, 762, "new weights sample the next iteration", 10.5, color=BLUE)
    return canvas


def main(names: Sequence[str] = ("how_it_works",)) -> None:
    for name in names:
        path = HERE / f"{name}.svg"
        {"how_it_works": how_it_works}[name]().save(path)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
