"""A run's folder -> one self-contained ``report.html`` that a person opens.

    python -m recipes.report outputs/t2i_flux/<time>

Everything is read from the folder: configuration, environment, metrics, timings, sample grids, exported weights. The
page loads nothing from elsewhere and runs no script; its content policy forbids both.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from omegaconf import OmegaConf
from PIL import Image

from core import metrics
from core.checkpoint import write_atomic
from core.errors import UserError

Row = Mapping[str, float | None]
Line = tuple[list[float], list[float]]  # iterations, values

DASH, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
INK, MUTED, RULE = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, SLATE, RED = "#2563eb", "#94a3b8", "#dc2626"
PALETTE = (BLUE, "#ea580c", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#475569")
PHASES = {"rollout": BLUE, "old": "#93c5fd", "update": "#f59e0b", "eval": "#10b981"}


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run's folder holds. rows, timings: one mapping an iteration; grids: iteration -> picture."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    grids: dict[int, Path]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Raises UserError when the folder is no run or has nothing to show yet."""
        file = folder / "metrics.jsonl"
        if not file.is_file():
            raise UserError(f"'{folder}' is not a run folder (it has no metrics.jsonl); give outputs/<recipe>/<time>")
        rows = metrics.read(file)
        if not rows:
            raise UserError(f"'{file}' has no row yet; wait for the first evaluation, then make the report again")
        text = _text(folder / "config.yaml")
        try:
            config = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
            environment = json.loads(_text(folder / "environment.json") or "{}")
        except Exception as error:  # OmegaConf has a dozen kinds of error
            raise UserError(f"config.yaml or environment.json of '{folder}' cannot be read ({error})") from error
        timings = metrics.read(folder / "timings.jsonl") if (folder / "timings.jsonl").is_file() else []
        found = [(re.fullmatch(r"iteration_(\d+)", p.stem), p) for p in sorted((folder / "samples").glob("*.png"))]
        grids = {int(match[1]): path for match, path in found if match}
        return cls(folder, config if isinstance(config, dict) else {}, text, environment, rows, timings, grids)

    def option(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted name."""
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, Mapping) or node.get(part) is None:
                return default
            node = node[part]
        return node

    @property
    def iterations(self) -> int:
        return int(self.rows[-1]["iteration"])

    @property
    def scores(self) -> list[str]:
        """Every score, held-out or trained on, the main one first."""
        keys = [key.split("/") for row in self.rows for key in row]
        held = [k[1] for k in keys if k[0] == "eval" and len(k) == 2]
        names = list(dict.fromkeys([*held, *(k[1] for k in keys if k[0] == "reward" and len(k) == 3)]))
        main = self.option("report.main_score")
        return sorted(names, key=lambda name: name != main)

    @property
    def weights_path(self) -> str:
        folder = self.folder.resolve()
        here = Path.cwd()
        return f"{folder.relative_to(here) if folder.is_relative_to(here) else folder.name}/weights"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def line(rows: Iterable[Row], key: str) -> Line:
    """Iterations and values of one metric, without the rows that lack it."""
    pairs = [(float(row["iteration"] or 0), float(row[key])) for row in rows if row.get(key) is not None]  # type: ignore[arg-type]
    return [x for x, _ in pairs], [y for _, y in pairs]


def lines(rows: Sequence[Row], pattern: str) -> dict[str, Line]:
    """Label -> line of every metric named ``pattern`` ("*" = one part), and of its streams ``pattern/<stream>``."""
    regex = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)") + "(?:/([^/]+))?")
    base = pattern.rsplit("/", 1)[-1].replace("_", " ")
    out = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if match := regex.fullmatch(key):
            parts = [part for part in match.groups() if part]
            found = line(rows, key)
            if found[0]:
                out[" ".join(parts) if "*" in pattern else " ".join([base, *parts])] = found
    return out


# ---- health --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """ok: True = normal, False = look at it, None = cannot be told yet. sentence: what is normal, and this run."""

    name: str
    ok: bool | None
    sentence: str


@dataclass(frozen=True)
class Panel:
    """One check: the metrics it draws, what it judges, and the limits drawn as dashed lines.

    worst: which of several streams' (or scores') values counts in an iteration. extra: judged but not drawn.
    """

    name: str
    keys: tuple[str, ...]
    judge: Callable[..., tuple[bool | None, str]]
    limits: tuple[float, ...] = ()
    worst: Callable[[Iterable[float]], float] = max
    extra: tuple[str, ...] = ()


def health(rows: Sequence[Row]) -> list[Finding]:
    """One finding a panel, in the order of PANELS; a pure function of the metrics."""
    return [_judge(panel, rows) for panel in PANELS]


def _judge(panel: Panel, rows: Sequence[Row]) -> Finding:
    drawn = [lines(rows, key) for key in panel.keys]
    lost = sum(_lost(rows, key) for key in panel.keys if not key.startswith("reward/"))
    ok, sentence = None, "Not recorded yet."
    if any(drawn):
        judged = [_per_iteration(found.values(), panel.worst) for found in drawn]
        ok, sentence = panel.judge(*judged, *(line(rows, key)[1] for key in panel.extra))
    if lost:
        ok, sentence = False, f"{lost} recorded value{_s(lost)} not finite. {sentence}"
    return Finding(panel.name, ok, sentence)


def _per_iteration(found: Iterable[Line], worst: Callable[[Iterable[float]], float]) -> list[float]:
    at: dict[float, list[float]] = {}
    for x, y in found:
        for n, value in zip(x, y, strict=True):
            at.setdefault(n, []).append(value)
    return [worst(at[n]) for n in sorted(at)]


def _lost(rows: Sequence[Row], key: str) -> int:
    return sum(k == key or k.startswith(f"{key}/") for row in rows for k, v in row.items() if v is None)


def _early(values: Sequence[float]) -> float:
    return statistics.median(values[: max(1, len(values) // 4)])


def _late(values: Sequence[float]) -> float:
    return statistics.median(values[-max(1, len(values) // 4) :])


def _ratio(most: list[float], first: list[float]) -> tuple[bool, str]:
    start, now = max(first, default=0.0), _late(most) if most else 0.0
    if start > 1e-4:
        return False, (
            f"Before an iteration's first update the ratio must be 1 (within 0.0001); here it was off by {num(start)}: "
            "old and new passes differ in dtype, kernels or dropout."
        )
    if max(most, default=0.0) <= 1e-4:
        return True, "The ratio must be 1 before an iteration's first update; it is, and with one update it stays 1."
    return now <= 0.5, (
        f"1 before the first update, as it must be; afterwards a largest deviation below 0.5 is normal, "
        f"lately it is {num(now)}."
    )


def _clip(values: list[float]) -> tuple[bool, str]:
    now = statistics.fmean(values[-max(1, len(values) // 4) :])
    if max(values) == 0:
        return True, "Below half of the samples is normal; here no sample was ever clipped."
    return now <= 0.5, f"Below half of the samples is normal; lately {percent(now)} are clipped."


def _kl(values: list[float]) -> tuple[bool, str]:
    high = float(np.quantile(values, 0.95))
    if max(values) < 1e-12:
        return True, "Below 0.02 within an iteration is normal; with one update it is 0 by construction."
    return high <= 0.02, f"Below 0.02 within an iteration is normal; 95 % of the iterations stay below {num(high)}."


def _grad_norm(values: list[float], skipped: list[float]) -> tuple[bool, str]:
    if max(values) == 0:
        return False, "Every gradient was exactly 0, so nothing could learn: look at the reward's spread."
    moving = [v for v in values if v > 0]
    early, late, lost = _early(moving), _late(moving), int(skipped[-1]) if skipped else 0
    steady = late <= 10 * early
    tail = f"{lost} step{_s(lost)} skipped as not finite" if lost else "no step was skipped"
    return steady and not lost, (
        f"Steady, less than ten times the start, is normal: {num(early)} early, {num(late)} lately, {tail}."
    )


def _no_spread(values: list[float]) -> tuple[bool, str]:
    now = statistics.fmean(values[-max(1, len(values) // 4) :])
    return now <= 0.5, (
        f"Groups whose samples all score alike teach nothing; below 50 % is normal, lately {percent(now)}."
    )


def _valid(values: list[float]) -> tuple[bool, str]:
    mean = statistics.fmean(values)
    return mean >= 0.95, f"At least 95 % of the samples should get a score; {percent(mean)} did."


def _variation(overall: list[float], within: list[float]) -> tuple[bool, str]:
    now, inside = _late(overall), _late(within) if within else 0.0
    ok = now <= 0.5 and now <= max(2 * _early(overall), 0.1) and inside <= 1.05 * now
    return ok, (
        f"A variation below 0.5 that does not double, and less inside a group than overall, is normal; "
        f"lately {num(now)} overall and {num(inside)} inside."
    )


def _norm(values: list[float]) -> tuple[bool | None, str]:
    if len(values) < 2:
        return None, "Between 0.9 and 1.1 times the start's size is normal; measured only at the start so far."
    ok = 0.9 <= values[-1] <= 1.1
    return ok, f"Between 0.9 and 1.1 times the start's size is normal; now it is {num(values[-1])}."


def _drift(values: list[float]) -> tuple[bool | None, str]:
    if len(values) < 2:
        return None, "Above 0 and below 0.25 is normal; measured only at the start so far."
    if values[-1] == 0:
        return False, "Exactly 0: the trained weights do not reach the network's output."
    tail = f"now it is {num(values[-1])}"
    return values[-1] <= 0.25, f"Squared distance from the start above 0 and below 0.25 is normal; {tail}."


PANELS = (
    Panel("Policy ratio", ("policy/ratio_max_deviation", "policy/ratio_first_deviation"), _ratio),
    Panel("Clipped samples", ("policy/clipfrac",), _clip, (0.5,)),
    Panel("Approximate KL", ("policy/approx_kl",), _kl, (0.02,)),
    Panel("Gradient norm", ("policy/grad_norm",), _grad_norm, extra=("policy/skipped_steps",)),
    Panel("Groups without spread", ("group/zero_std_fraction",), _no_spread, (0.5,)),
    Panel("Valid scores", ("reward/*/valid_fraction",), _valid, (0.95,), worst=min),
    Panel("Surrogate variation", ("surrogate/cv", "surrogate/cv_within"), _variation),
    Panel(
        "Prediction size",
        ("model/velocity_norm_ratio",),
        _norm,
        (0.9, 1.1),
        worst=lambda values: max(values, key=lambda v: abs(v - 1)),
    ),
    Panel("Prediction drift", ("model/velocity_drift",), _drift, (0.25,)),
)


# ---- numbers in words ----------------------------------------------------------------------------------------------


def num(value: float | None, sign: bool = False) -> str:
    """Three significant digits for small numbers, separators and suffixes for large ones."""
    if value is None or not math.isfinite(value):
        return DASH
    size, plus = abs(value), "+" if sign else ""
    if size >= 1e6:
        scaled, suffix = (value / 1e9, " G") if size >= 1e9 else (value / 1e6, " M")
        text = f"{scaled:{plus}.2f}{suffix}"
    elif size >= 1000 or value == int(value):
        text = f"{value:{plus},.0f}"
    elif size >= 100:
        text = f"{value:{plus}.1f}"
    elif size >= 0.001:
        text = f"{value:{plus}.3f}"
    else:
        text = f"{value:{plus}.1e}"
    return text.replace("-", MINUS)


def percent(value: float) -> str:
    text = f"{100 * value:.1f}"
    return f"{text.removesuffix('.0')} %"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _s(count: int) -> str:
    return " was" if count == 1 else "s were"


def ends(found: Line) -> tuple[float | None, float | None]:
    """First value, and the last one if there is a later."""
    values = found[1]
    return (values[0] if values else None), (values[-1] if len(values) > 1 else None)


# ---- charts --------------------------------------------------------------------------------------------------------


def _axes(width: int, height: int) -> tuple[Figure, Axes]:
    """A chart ``width`` x ``height`` CSS pixels."""
    figure = Figure(figsize=(width / 96, height / 96), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SLATE)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=9, pad=5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.015)
    return figure, axes


def _picture(figure: Figure, alt: str) -> str:
    """An <img> with the figure as SVG. Its text stays text, in the reader's own sans-serif."""
    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "axes.unicode_minus": True}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = re.sub(r"('DejaVu Sans'|\"DejaVu Sans\")[^;\"]*", "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
                  out.getvalue().decode())  # fmt: skip
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}">'


def _draw(
    axes: Axes, found: Line, colour: str, label: str | None = None, marked: bool = False, width: float = 1.8
) -> None:
    alone = marked or len(found[0]) == 1
    axes.plot(*found, color=colour, linewidth=width, label=label, marker="o" if alone else None, markersize=4.5,
              markeredgecolor="white", markeredgewidth=0.8, solid_capstyle="round")  # fmt: skip


def _legend(axes: Axes, **where: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.4, **where)


def _clock(axes: Axes, timings: Sequence[Row]) -> None:
    """A second axis on top: the run's own seconds at the iterations below."""
    at, spent = line(timings, "seconds/total")
    if len(at) < 2 or sum(spent) <= 0:
        return
    total = np.cumsum(spent)
    divisor, unit = (1, "s") if total[-1] < 240 else (60, "min") if total[-1] < 3 * 3600 else (3600, "h")
    low, high = axes.get_xlim()
    ticks = [
        t
        for t in MaxNLocator(nbins=8, steps=[1, 2, 5, 10]).tick_values(0, total[-1] / divisor)
        if 0 < t * divisor <= total[-1]
    ]
    where = np.interp([t * divisor for t in ticks], total, at)
    top = axes.secondary_xaxis("top")
    top.spines["top"].set_visible(False)
    top.set_ticks([float(x) for x in where], [f"{t:g} {unit}" for t in ticks])
    top.tick_params(colors=SLATE, length=3, labelsize=8.5)
    axes.set_xlim(low, high)


def reward_chart(run: Run, score: str, width: int, height: int) -> str:
    """Training mean with a band of one standard deviation, and the held-out score; iterations below, seconds above."""
    figure, axes = _axes(width, height)
    x, mean = line(run.rows, f"reward/{score}/mean")
    spread = dict(zip(*line(run.rows, f"reward/{score}/std"), strict=True))
    if x:
        y, s = np.array(mean), np.array([spread.get(n, 0.0) for n in x])
        axes.fill_between(x, y - s, y + s, color=SLATE, alpha=0.18, linewidth=0)
        _draw(axes, (x, mean), SLATE, width=1.4)
    held = line(run.rows, f"eval/{score}")
    if held[0]:
        _draw(axes, held, BLUE, marked=True, width=2.2)
    axes.set_xlabel("iteration", color=MUTED, fontsize=9)
    axes.set_ylabel(score, color=MUTED, fontsize=9)
    _clock(axes, run.timings)
    return _picture(figure, f"{score} over iterations")


def tag_chart(run: Run, score: str, tags: Sequence[str], width: int, height: int) -> str:
    figure, axes = _axes(width, height)
    found = {tag: line(run.rows, f"eval/{score}/{tag}") for tag in tags}
    for k, (tag, values) in enumerate(sorted(found.items(), key=lambda item: -(item[1][1] or [-math.inf])[-1])):
        if values[0]:
            _draw(axes, values, PALETTE[k % len(PALETTE)], tag, marked=True)
    axes.set_xlabel("iteration", color=MUTED, fontsize=9)
    axes.set_ylabel(f"held-out {score}", color=MUTED, fontsize=9)
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _picture(figure, f"held-out {score} by tag over iterations")


def panel_chart(run: Run, panel: Panel, width: int, height: int) -> str:
    figure, axes = _axes(width, height)
    found = {label: values for key in panel.keys for label, values in lines(run.rows, key).items()}
    for k, (label, values) in enumerate(found.items()):
        _draw(axes, values, PALETTE[k % len(PALETTE)], _shorter(label), width=1.5)
    low, high = axes.get_ylim()
    span = max(high - low, 1e-12)
    for limit in panel.limits:
        if low - 2 * span <= limit <= high + 2 * span:
            axes.axhline(limit, color=RED, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-3, 4))
    if 1 < len(found) <= 4:
        _legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0, columnspacing=1)
    if panel.keys[0].endswith("fraction") and high > 1:
        axes.set_ylim(top=1.002)
    return _picture(figure, f"{panel.name} over iterations")


def _shorter(label: str) -> str:
    return label.replace("ratio max deviation", "largest").replace("ratio first deviation", "before the first update")


def cost_chart(run: Run, width: int, height: int, most: int = 60) -> str:
    """Seconds an iteration, phases stacked; long runs are averaged into at most ``most`` bars."""
    figure, axes = _axes(width, height)
    phases = _phases(run.timings)
    size = max(1, math.ceil(len(run.timings) / most))
    parts = [run.timings[start : start + size] for start in range(0, len(run.timings), size)]
    middle = [statistics.fmean(row["iteration"] for row in part) for part in parts]
    floor = np.zeros(len(parts))
    for k, phase in enumerate(phases):
        values = np.array([statistics.fmean(row.get(f"seconds/{phase}") or 0.0 for row in part) for part in parts])
        axes.bar(middle, values, 0.86 * size, floor, color=PHASES.get(phase, PALETTE[(4 + k) % 8]), label=phase)
        floor += values
    axes.set_xlabel("iteration", color=MUTED, fontsize=9)
    axes.set_ylabel("seconds an iteration", color=MUTED, fontsize=9)
    axes.set_ylim(0, 1.25 * max(floor.max(), 1e-3))
    _legend(axes, loc="upper right", ncols=len(phases))
    return _picture(figure, "seconds an iteration by phase")


def _phases(timings: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(k.split("/", 1)[1] for row in timings for k in row if k.startswith("seconds/"))
    order = list(PHASES)
    return sorted((n for n in names if n != "total"), key=lambda n: order.index(n) if n in order else len(order))


# ---- the page ------------------------------------------------------------------------------------------------------

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light; --ink: #111827; --text: #374151; --muted: #6b7280; --rule: #e5e7eb; --soft: #f8fafc;
  --blue: #2563eb; --green: #15803d; --red: #b91c1c; --amber: #b45309; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--text); font: 15px/1.6 system-ui, "Segoe UI", Helvetica, Arial,
  sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1180px; margin: 0 auto; padding: 48px 28px 80px; }
h1, h2, h3 { color: var(--ink); line-height: 1.25; margin: 0; font-weight: 650; letter-spacing: -0.01em; }
h1 { font-size: 34px; letter-spacing: -0.02em; margin: 6px 0 12px; }
h2 { font-size: 21px; }
h3 { font-size: 15px; }
p { margin: 0; }
section { margin-top: 56px; }
section > header { border-top: 1px solid var(--rule); padding-top: 20px; margin-bottom: 20px; }
section > header p, .note { color: var(--muted); font-size: 14px; margin-top: 4px; max-width: 80ch; }
.over { font-size: 13px; font-weight: 600; letter-spacing: 0.04em; color: var(--blue); }
.chips { display: flex; flex-wrap: wrap; gap: 8px; }
.chips span { border: 1px solid var(--rule); border-radius: 999px; padding: 3px 12px; font-size: 13px; }
.chips b { color: var(--ink); font-weight: 600; }
img { display: block; width: 100%; height: auto; }
.cards { display: grid; grid-template-columns: 1.7fr repeat(3, 1fr); gap: 14px; margin-top: 32px; }
.card { border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px; background: #fff; min-width: 0; }
.card .label { font-size: 13px; color: var(--muted); }
.card .value { font-size: 25px; font-weight: 650; color: var(--ink); line-height: 1.3; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.card .sub { font-size: 12.5px; color: var(--muted); line-height: 1.4; }
.card.main { background: var(--soft); border-color: #dbe4f0; grid-row: span 2; padding: 24px; display: flex;
  flex-direction: column; justify-content: center; }
.card.main .label { font-size: 15px; color: var(--text); font-weight: 600; }
.card.main .value { font-size: 42px; line-height: 1.25; margin: 4px 0 6px; display: flex; align-items: center;
  gap: 4px 14px; flex-wrap: wrap; }
.card.main .sub { font-size: 13.5px; }
.card.main .value i { font-style: normal; color: #9ca3af; font-weight: 400; }
.pill { font-size: 17px; font-weight: 650; border-radius: 999px; padding: 2px 12px; letter-spacing: 0; }
.up { color: var(--green); } .down { color: var(--red); }
.pill.up { background: #dcfce7; } .pill.down { background: #fee2e2; } .pill.same { background: #f1f5f9; }
.two { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 24px; align-items: start; }
.three { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; color: var(--muted); margin-bottom: 8px; }
figcaption b { color: var(--ink); }
img.grid { width: auto; max-width: 100%; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; vertical-align: middle;
  margin: 0 6px 2px 14px; background: var(--colour); }
.key.band::before { height: 11px; opacity: 0.3; }
.gap { margin-top: 28px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px; border-bottom: 1px solid #cbd5e1; }
th, td { padding: 8px 12px 8px 0; }
td { border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; }
.facts td { padding: 6px 12px 6px 0; vertical-align: top; } .facts td:first-child { width: 36%; color: var(--muted); }
tr.all td { font-weight: 650; color: var(--ink); }
td.bar { width: 38%; padding-left: 20px; padding-right: 0; }
.track { position: relative; height: 10px; border-radius: 5px; background: #eef2f7; overflow: hidden; }
.track span { position: absolute; top: 0; height: 10px; }
.finding { border: 1px solid var(--rule); border-radius: 12px; padding: 14px 16px 16px; display: flex;
  flex-direction: column; min-width: 0; }
.finding.bad { border-color: #f5c28a; background: #fffaf3; }
.finding .head { display: flex; justify-content: space-between; align-items: baseline; gap: 8px; }
.finding .state { font-size: 12.5px; font-weight: 600; white-space: nowrap; }
.finding p { font-size: 13.5px; line-height: 1.5; margin-top: 8px; }
.ok .state { color: var(--green); } .bad .state { color: var(--amber); } .unknown .state { color: var(--muted); }
.finding .none { height: 40px; }
pre, code { font-family: ui-monospace, "SF Mono", Consolas, "Liberation Mono", monospace; font-size: 13px; }
pre { background: var(--soft); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; margin: 12px 0 0;
  overflow-x: auto; line-height: 1.55; color: var(--ink); }
details > summary { cursor: pointer; font-weight: 600; color: var(--ink); }
@media (max-width: 1000px) { .cards { grid-template-columns: repeat(3, 1fr); } .card.main { grid-column: 1 / -1; }
  .three { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 720px) { main { padding: 28px 16px 56px; } .two, .three { grid-template-columns: 1fr; }
  h1 { font-size: 27px; } .cards { grid-template-columns: repeat(2, 1fr); } .card.main .value { font-size: 32px; }
  .card .value { font-size: 21px; } td.bar, th.bar { display: none; } section { margin-top: 40px; } }
@media print { section, .finding, figure { break-inside: avoid; } main { padding: 0; } }
"""


def write_report(run: Path) -> Path:
    """Write ``<run>/report.html`` from the files of the run and return its path.

    Raises UserError when the folder is missing, is not a run, or has no metrics yet.
    """
    found = Run.read(Path(run))
    path = found.folder / "report.html"
    write_atomic(path, page(found))
    return path


def page(run: Run) -> str:
    parts = (_title, _cards, _rewards, _samples, _tables, _health, _costs, _settings, _use)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(_recipe(run))}, run report</title><style>{STYLE}</style>"
    )
    body = "\n".join(part(run) for part in parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _section(title: str, lead: str, body: str) -> str:
    lead = f"<p>{lead}</p>" if lead else ""
    return f"<section><header><h2>{title}</h2>{lead}</header>{body}</section>" if body else ""


def _figure(image: str, caption: str = "") -> str:
    caption = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{caption}{image}</figure>"


def _recipe(run: Run) -> str:
    match = re.search(r"recipes\.(\w+)", str(run.environment.get("command", "")))
    return run.option("recipe") or (match[1] if match else run.folder.resolve().parent.name)


def _algorithm(run: Run) -> str:
    """The composition's name, where the command chose one, and the options that make it what it is."""
    match = re.search(r"(?:^|\s)\+?algorithm=([\w.-]+)", str(run.environment.get("command", "")))
    name = run.option("algorithm.name") or (match[1] if match else "vgrpo")
    details = []
    if (pairs := run.option("algorithm.elbo.n_pairs")) is not None:
        details.append(f"{pairs} pairs a sample")
    if (updates := run.option("algorithm.updates")) is not None:
        updates *= run.option("algorithm.epochs", 1)
        details.append(f"{updates} update{'s' if updates > 1 else ''} an iteration")
    for key, label in (("algorithm.clip", "clip"), ("algorithm.advantage.soft_clip", "soft clip")):
        if (value := run.option(key)) is not None:
            details.append(f"{label} {value:g}")
    return f"<b>{escape(str(name))}</b>" + escape("".join(f" · {d}" for d in details))


def _title(run: Run) -> str:
    goal = run.option("train.iterations")
    short = goal is not None and run.iterations < goal
    state = f"iteration {run.iterations} of {goal}" if short else f"{run.iterations} iterations"
    chips = [f"model <b>{escape(str(run.option('model.path', 'unknown')))}</b>", f"algorithm {_algorithm(run)}"]
    if mode := run.option("tune.mode"):
        rank = f" · rank {run.option('tune.rank')}" if mode == "lora" else ""
        chips.append(f"trains <b>{escape(str(mode))}</b>{rank}")
    chips.append(f"<b>{state}</b>")
    over = f'<div class="over">Run report · {escape(run.folder.resolve().name)}</div>'
    row = "".join(f"<span>{chip}</span>" for chip in chips)
    return f'<header>{over}<h1>{escape(_recipe(run))}</h1><div class="chips">{row}</div></header>'


def _change(before: float | None, after: float | None) -> tuple[str, str]:
    """(CSS class, signed difference)."""
    if before is None or after is None:
        return "same", DASH
    d = after - before
    return ("up" if d > 0 else "down" if d < 0 else "same"), num(d, sign=True)


def _cards(run: Run) -> str:
    cards = []

    def card(label: str, value: str, sub: str, kind: str = "") -> None:
        cards.append(
            f'<div class="card {kind}"><div class="label">{label}</div>'
            f'<div class="value">{value}</div><div class="sub">{sub}</div></div>'
        )

    score = run.scores[0] if run.scores else None
    held = line(run.rows, f"eval/{score}")
    before, after = ends(held)
    if before is None:
        card("Held-out score", DASH, "no held-out evaluation", "main")
    elif after is None:
        card(f"Held-out {escape(str(score))}", num(before), f"at iteration {held[0][0]:.0f}; no later one yet", "main")
    else:
        kind, change = _change(before, after)
        best = max(range(len(held[1])), key=held[1].__getitem__)
        sub = f"before training → after {held[0][-1]:.0f} iterations"
        if held[1][best] > max(before, after):
            sub += f"; best {num(held[1][best])} at iteration {held[0][best]:.0f}"
        value = f'{num(before)} <i>→</i> {num(after)} <span class="pill {kind}">{change}</span>'
        card(f"Held-out {escape(str(score))}", value, sub, "main")
    prompts, group = run.option("train.prompts"), run.option("train.group_size")
    if prompts and group:
        card("Samples seen", num(run.iterations * prompts * group), f"{prompts} prompts {TIMES} {group} an iteration")
    else:
        card("Samples seen", DASH, "batch size not in config.yaml")
    evaluations = line(run.rows, "nfe/total")[1]
    card("Network evaluations", num(evaluations[-1] if evaluations else 0), "one sample, one pass; rollout and update")
    spent = sum(line(run.timings, "seconds/total")[1])
    card("Wall time", duration(spent) if run.timings else DASH, "rollout, update, evaluation")
    peak = line(run.timings, "memory/peak_mb")[1]
    card("Peak memory", f"{max(peak) / 1024:.2f} GiB" if peak else DASH, "of the device; on CPU, of the process")
    goal = run.option("train.iterations")
    card("Iterations", num(run.iterations), f"of {num(goal)} planned" if goal else "")
    steps, skipped = line(run.rows, "policy/steps")[1], line(run.rows, "policy/skipped_steps")[1]
    card("Skipped steps", num(skipped[-1] if skipped else 0), f"{num(steps[-1] if steps else 0)} optimizer steps taken")
    return f'<div class="cards">{"".join(cards)}</div>'


def _tags(run: Run, score: str) -> list[str]:
    prefix = f"eval/{score}/"
    return list(dict.fromkeys(k.removeprefix(prefix) for row in run.rows for k in row if k.startswith(prefix)))


def _rewards(run: Run) -> str:
    if not run.scores:
        return ""
    main, *others = run.scores
    keys = "".join(
        f'<span class="key {kind}" style="--colour: {colour}">{label}</span>'
        for label, colour, kind in (
            ("held-out", BLUE, ""),
            ("training mean", SLATE, ""),
            ("± one standard deviation of its samples", SLATE, "band"),
        )
    )
    body = _figure(reward_chart(run, main, 1124, 380), f"<b>{escape(main)}</b>{keys}")
    small = [_figure(reward_chart(run, s, 540, 290), f"<b>{escape(s)}</b>") for s in others]
    if tags := _tags(run, main):
        small.insert(0, _figure(tag_chart(run, main, tags, 540, 290), f"Held-out <b>{escape(main)}</b> by tag"))
    if small:
        body += f'<div class="two gap">{"".join(small)}</div>'
    lead = (
        "Held-out prompts are never trained on, and every evaluation uses the same noise, so that only the weights "
        "differ. The upper axis is the run's own time."
    )
    return _section("Reward", lead, body)


def _samples(run: Run) -> str:
    if not run.grids:
        return ""
    chosen = dict.fromkeys([min(run.grids), max(run.grids)])
    names = ["Before training" if n == 0 else f"After {n} iterations" for n in chosen]
    figures = [
        _figure(_grid_image(run.grids[n], name), f"<b>{name}</b>") for n, name in zip(chosen, names, strict=True)
    ]
    lead = "The same held-out prompts with the same noise. A green frame: verified right; a red one: wrong."
    return _section("Samples", lead, f'<div class="two">{"".join(figures)}</div>')


def _grid_image(path: Path, alt: str, limit: int = 3_000_000) -> str:
    """The picture as it is, or smaller and as JPEG if it would weigh the page down."""
    data, kind = path.read_bytes(), "png"
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            if len(data) > limit:
                image.thumbnail((1800, 4000))
                out = io.BytesIO()
                image.convert("RGB").save(out, format="JPEG", quality=88)
                data, kind = out.getvalue(), "jpeg"
    except (OSError, SyntaxError):  # Pillow's word for a broken PNG
        return f'<p class="note">{escape(path.name)} cannot be read.</p>'
    return f'<img class="grid" alt="{escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def _tables(run: Run) -> str:
    held = [s for s in run.scores if line(run.rows, f"eval/{s}")[0]]
    if not held:
        return ""
    blocks = []
    main = run.scores[0]
    if main in held and (tags := _tags(run, main)):
        keys = {tag: f"eval/{main}/{tag}" for tag in tags} | {"all": f"eval/{main}"}
        blocks.append(_before_after(run, "tag", keys))
    if len(held) > 1 or not blocks:
        blocks.append(_before_after(run, "score", {s: f"eval/{s}" for s in held}, common=False))
    return _section(
        "Before and after", f"Held-out means; the first table is of {escape(main)}." if len(blocks) > 1 else
        f"Held-out means of {escape(main)}.", '<div class="gap"></div>'.join(blocks),
    )  # fmt: skip


def _before_after(run: Run, head: str, keys: Mapping[str, str], common: bool = True) -> str:
    """common: all rows are on one scale, so a bar from before to after says something."""
    pairs = {name: ends(line(run.rows, key)) for name, key in keys.items()}
    known = [v for pair in pairs.values() for v in pair if v is not None]
    low, high = min([0.0, *known]), max([1e-9, *known])
    high = 1.0 if low == 0 and high <= 1 else high
    body = ""
    for name, (before, after) in pairs.items():
        kind, change = _change(before, after)
        bar = f"<td class=bar>{_bar(before, after, low, high)}</td>" if common else ""
        body += (
            f"<tr{' class=all' if name == 'all' else ''}><td>{escape(name)}</td><td class=n>{num(before)}</td>"
            f'<td class=n>{num(after)}</td><td class="n {kind}">{change}</td>{bar}</tr>'
        )
    last = f"<th class=bar style='padding-left:20px'>{num(low)} to {num(high)}</th>" if common else ""
    return (
        f"<table><thead><tr><th>{head}</th><th class=n>before</th><th class=n>after</th><th class=n>change</th>{last}"
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def _bar(before: float | None, after: float | None, low: float, high: float) -> str:
    if before is None:
        return '<div class="track"></div>'
    a, b = (100 * (v - low) / (high - low) for v in (before, before if after is None else after))
    colour = "#86cfa1" if b >= a else "#f0a3a3"
    return (
        f'<div class="track"><span style="left:0;width:{min(a, b):.1f}%;background:#b8c4d6"></span>'
        f'<span style="left:{min(a, b):.1f}%;width:{abs(b - a):.1f}%;background:{colour}"></span></div>'
    )


STATES = {True: ("ok", "normal"), False: ("bad", "look at this"), None: ("unknown", "not known yet")}


def _health(run: Run) -> str:
    findings = health(run.rows)
    cards = ""
    for panel, finding in zip(PANELS, findings, strict=True):
        kind, state = STATES[finding.ok]
        drawn = any(lines(run.rows, key) for key in panel.keys)
        chart = panel_chart(run, panel, 326, 170) if drawn else '<div class="none"></div>'
        cards += (
            f'<div class="finding {kind}"><div class="head"><h3>{panel.name}</h3>'
            f'<span class="state">{state}</span></div>{chart}<p>{escape(finding.sentence)}</p></div>'
        )
    bad = [f.name.lower() for f in findings if f.ok is False]
    known = sum(f.ok is not None for f in findings)
    lead = f"Look at: {', '.join(bad)}." if bad else f"All {known} checks that can be made are normal."
    lead += " A dashed red line is the limit of what is normal."
    return _section("Health", lead, f'<div class="three">{cards}</div>')


def _costs(run: Run) -> str:
    if not run.timings:
        return ""
    phases = {phase: sum(line(run.timings, f"seconds/{phase}")[1]) for phase in _phases(run.timings)}
    evaluations = {phase: sum(line(run.rows, f"nfe/{phase}")[1]) for phase in ("rollout", "update")}
    total, body = sum(phases.values()), ""
    for phase, seconds in phases.items():
        share = percent(seconds / total) if total > 0 else DASH
        passes = num(evaluations[phase]) if phase in evaluations else DASH
        body += (
            f"<tr><td>{escape(phase)}</td><td class=n>{duration(seconds)}</td><td class=n>{share}</td>"
            f"<td class=n>{passes}</td></tr>"
        )
    body += (
        f"<tr class=all><td>all</td><td class=n>{duration(total)}</td><td class=n></td>"
        f"<td class=n>{num(sum(evaluations.values()))}</td></tr>"
    )
    heads = "".join(f"<th class=n>{name}</th>" for name in ("time", "share", "network evaluations"))
    table = f"<table><thead><tr><th>phase</th>{heads}</tr></thead><tbody>{body}</tbody></table>"
    peak = line(run.timings, "memory/peak_mb")[1]
    note = f'<p class="note">Peak memory {max(peak) / 1024:.2f} GiB.</p>' if peak else ""
    drawn = cost_chart(run, 540, 270) if phases else ""
    lead = "A network evaluation is one sample through one forward pass. The rollout's time includes scoring."
    return _section("Costs", lead, f'<div class="two">{_figure(drawn)}<div>{table}{note}</div></div>')


def _facts(values: Mapping[str, Any]) -> str:
    words = {True: "yes", False: "no", None: "none"}
    rows = "".join(
        f"<tr><td>{escape(str(key).replace('_', ' '))}</td>"
        f"<td><code>{escape(str(words[value] if isinstance(value, bool | None) else value))}</code></td></tr>"
        for key, value in values.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def _settings(run: Run) -> str:
    plain = {k: v for k, v in run.environment.items() if not isinstance(v, Mapping)}
    nested = [v for v in run.environment.values() if isinstance(v, Mapping)]
    tables = "".join(_facts(values) for values in (plain, *nested))
    out = ""
    if run.config_text.strip():
        text = f"<pre>{escape(run.config_text.strip())}</pre>"
        fold = f"<details><summary>config.yaml, every value resolved</summary>{text}</details>"
        out += _section("Configuration", "", fold)
    return out + _section("Environment", "", f'<div class="two">{tables}</div>' if tables else "")


def _use(run: Run) -> str:
    """How to load what the run exported: the adapter's own lines (weights/README.md), else LoRA's."""
    folder, path = run.folder / "weights", run.weights_path
    lead = "" if folder.is_dir() else "The run has not exported its weights yet; when it has:"
    if match := re.search(r"```python\n(.*?)```", _text(folder / "README.md"), re.DOTALL):
        code = match[1].strip().replace(f'"{folder.name}"', f'"{path}"')
    elif run.option("tune.mode") == "lora":
        base = run.option("model.path", "<base model>")
        code = f'pipe = DiffusionPipeline.from_pretrained("{base}")\npipe.load_lora_weights("{path}")'
    else:
        code = "\n".join([path, *(f"  {p.name}" for p in sorted(folder.glob("*")))])
    return _section("Use the weights", lead, f"<pre>{escape(code)}</pre>")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.report", description="Write a run's report.html.")
    parser.add_argument("run", type=Path, help="the run's folder, outputs/<recipe>/<time>")
    try:
        print(write_report(parser.parse_args(arguments).run))
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
