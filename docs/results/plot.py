"""Curves of the embedded FLUX runs: ``python docs/results/plot.py outputs/results`` after the runs of README.md here.

Reads <folder>/{seed,shuffled}_<n>/{metrics,timings}.jsonl, writes embedded_flux.svg, embedded_flux.csv and the table
that README.md quotes (to the terminal).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

from core.metrics import read

HERE = Path(__file__).parent
TRAINING = ("seconds/rollout", "seconds/old", "seconds/update")
COLOURS = {"seed": "#2563eb", "shuffled": "#9ca3af"}
LABELS = {"seed": "V-GRPO", "shuffled": "advantages shuffled within the group"}


def curve(run: Path) -> list[dict[str, float]]:
    """Rows of (iteration, training seconds, held-out accuracy); evaluation time does not count as training."""
    seconds, rows = 0.0, []
    for metrics, timings in zip(read(run / "metrics.jsonl"), read(run / "timings.jsonl"), strict=True):
        seconds += sum(timings.get(key, 0.0) for key in TRAINING)
        if metrics.get("eval/scene_correct") is not None:
            rows.append(
                {"iteration": metrics["iteration"], "seconds": seconds, "accuracy": metrics["eval/scene_correct"]}
            )
    return rows


def main(folder: Path) -> None:
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    table = []
    for run in sorted(folder.glob("*_[0-9]")):
        kind, seed = run.name.split("_")
        rows = curve(run)
        label = LABELS[kind] if seed == "0" else None  # once a kind
        xs, ys = [r["iteration"] for r in rows], [100 * r["accuracy"] for r in rows]
        axes.plot(xs, ys, color=COLOURS[kind], label=label, lw=1.8, marker="o", ms=3)
        table += [{"run": run.name, **row} for row in rows]
        change, seconds = ys[-1] - ys[0], rows[-1]["seconds"]
        print(f"{run.name:12s} {ys[0]:5.1f} % -> {ys[-1]:5.1f} % ({change:+5.1f}) in {seconds:4.0f} s of training")
    axes.set(xlabel="iteration", ylabel="held-out exact accuracy, %", title="Embedded FLUX, one line a run")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / "embedded_flux.svg", metadata={"Date": None})
    with (HERE / "embedded_flux.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, ["run", "iteration", "seconds", "accuracy"])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
