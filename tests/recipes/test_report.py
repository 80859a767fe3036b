"""Grids and the run report, on run folders made here."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.errors import UserError
from recipes import grids, report
from recipes.grids import image_grid, save_png
from recipes.report import health, write_report
from rewards import scenes

CONFIG = """
run: train
model:
  path: embedded
  dtype: float32
algorithm:
  clip: {clip}
  updates: {updates}
  advantage:
    soft_clip: 3.0
  elbo:
    n_pairs: 4
    share: t_noise
train:
  iterations: {iterations}
  prompts: 12
  group_size: 16
  learning_rate: 3.0e-4
tune:
  mode: lora
  rank: 16
report:
  main_score: scene_correct
"""
ENVIRONMENT = {
    "command": "python -m recipes.t2i_flux algorithm=vgrpo_multi_step train.seed=1",
    "commit": "0123abcd",
    "uncommitted_changes": False,
    "gpu": None,
    "packages": {"torch": "2.9.0", "diffusers": "0.38.0"},
}


def metric_rows(iterations: int, updates: int = 4, eval_every: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """What a healthy run writes: two scores, the scenes' tags, held-out values that rise."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for n in range(iterations + 1):
        done = 1 - math.exp(-2.5 * n / max(1, iterations))
        row: dict[str, Any] = {"iteration": n}
        if n:
            for score, base in (("scene", 0.55), ("scene_correct", 0.38)):
                row[f"reward/{score}/mean"] = base + 0.36 * done + 0.03 * rng.standard_normal()
                row[f"reward/{score}/std"] = 0.34 - 0.1 * done
                row[f"reward/{score}/valid_fraction"] = 1.0
            moved = 0.012 * (updates > 1)
            row |= {
                "group/zero_std_fraction": float(np.clip(0.08 + 0.2 * done + 0.05 * rng.standard_normal(), 0, 1)),
                "policy/loss": 0.01 * rng.standard_normal(),
                "policy/ratio_mean": 1.0,
                "policy/ratio_max_deviation": moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/ratio_first_deviation": 0.0,
                "policy/clipfrac": 8 * moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/approx_kl": 0.002 * moved * float(np.exp(0.3 * rng.standard_normal())),
                "policy/grad_norm": 0.5 * float(np.exp(0.2 * rng.standard_normal())),
                "policy/steps": n * updates,
                "policy/skipped_steps": 0,
                "surrogate/mean": -0.4,
                "surrogate/cv": 0.13 + 0.01 * rng.standard_normal(),
                "surrogate/cv_within": 0.04 + 0.004 * rng.standard_normal(),
                "nfe/rollout": 1920,
                "nfe/update": 1536,
                "nfe/total": 3456 * n,
            }
        if n % eval_every == 0 or n == iterations:
            for score, base in (("scene", 0.54), ("scene_correct", 0.36)):
                row[f"eval/{score}"] = base + 0.37 * done
                for k, tag in enumerate(scenes.TAGS):
                    row[f"eval/{score}/{tag}"] = min(1.0, base + 0.2 - 0.09 * k + (0.25 + 0.03 * k) * done)
            row |= {"model/velocity_norm_ratio": 1 + 0.02 * done, "model/velocity_drift": 0.04 * done}
        rows.append(row)
    return rows


def timing_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for row in rows:
        seconds = {"seconds/rollout": 2.1, "seconds/update": 3.2} if row["iteration"] else {}
        if any(key.startswith("eval/") for key in row):
            seconds["seconds/eval"] = 4.5
        total = {"seconds/total": sum(seconds.values())}
        out.append({"iteration": row["iteration"], **seconds, **total, "memory/peak_mb": 1850.0})
    return out


def pictures(correct: float, seed: int = 0, n: int = 30) -> Image.Image:
    """Held-out scenes, a share of them drawn right, the others drawn as another prompt's."""
    rng = np.random.default_rng(seed)
    by_tag = scenes.split()[1]
    asked = [found[i % len(found)] for found in by_tag.values() for i in range(n // len(by_tag))]
    marks = [bool(rng.random() < correct) for _ in asked]
    drawn = [
        scenes.render(scene if mark else other, rng)
        for scene, other, mark in zip(asked, asked[::-1], marks, strict=True)
    ]
    return image_grid([torch.from_numpy(x) for x in drawn], [s.prompt for s in asked], marks, columns=5)


def fake_run(
    folder: Path,
    rows: list[dict[str, Any]],
    timings: bool = True,
    samples: bool = True,
    config: str | None = None,
    environment: Mapping[str, Any] | None = ENVIRONMENT,
) -> Path:
    folder.mkdir(parents=True)
    text = CONFIG.format(clip=0.01, updates=4, iterations=max(1, len(rows) - 1)) if config is None else config
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    if environment is not None:
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if timings:
        lines = "".join(json.dumps(row) + "\n" for row in timing_rows(rows))
        (folder / "timings.jsonl").write_text(lines, encoding="utf-8")
    if samples:
        for n, correct in ((0, 0.3), (len(rows) // 2, 0.6), (len(rows) - 1, 0.85)):
            save_png(pictures(correct), folder / "samples" / f"iteration_{n:06d}.png")
    return folder


# ---- grids ---------------------------------------------------------------------------------------------------------


def plain(value: int, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.full((height, width, 3), value, dtype=torch.uint8)


def test_grid_places_cells_row_by_row() -> None:
    image = image_grid([plain(v) for v in (10, 20, 30, 40)], ["a"] * 4, [None] * 4, columns=3, cell=96)
    gap = (image.width - 3 * 96) // 4
    centres = [image.getpixel((gap + 48 + k * (96 + gap), gap + 48))[0] for k in range(3)]
    assert centres == [10, 20, 30]
    below = {image.getpixel((gap + 48, y))[0] for y in range(96 + 2 * gap, image.height)}
    assert 40 in below


def test_tiny_pictures_grow_by_whole_factors_with_square_pixels() -> None:
    image = torch.zeros(2, 2, 3, dtype=torch.uint8)
    image[0, 1] = 250
    tile = np.asarray(grids._tile(image, None, 96))[2:-2, 2:-2, 0]
    assert set(np.unique(tile)) == {0, 250}
    assert (tile[:46, 46:] == 250).all()
    assert (tile == 250).sum() == 46 * 46


@pytest.mark.parametrize("size", [(200, 300), (300, 200), (96, 96), (40, 25), (1000, 3)])
def test_pictures_of_any_shape_fit_their_cell(size: tuple[int, int]) -> None:
    assert grids._tile(plain(7, *size), None, 96).size == (96, 96)


@pytest.mark.parametrize(("mark", "colour"), [(True, grids.RIGHT), (False, grids.WRONG), (None, grids.LINE)])
def test_marks_frame_the_picture(mark: bool | None, colour: tuple[int, int, int]) -> None:
    assert grids._tile(plain(255), mark, 96).getpixel((0, 95)) == colour


def test_a_missing_picture_is_a_grey_box_with_a_cross() -> None:
    tile = grids._tile(None, None, 96)
    assert tile.getpixel((48, 8)) == grids.GREY
    assert tile.getpixel((48, 48)) == grids.LINE


@pytest.mark.parametrize("text", ["two red circles above a blue square", "x" * 200, "", "ein Übergrößenträger " * 20])
def test_captions_are_wrapped_to_the_cell(text: str) -> None:
    font = grids.ImageFont.load_default(12)
    lines = grids._wrap(text, font, 96)
    assert len(lines) <= grids.MAX_LINES
    assert all(font.getlength(line) <= 96 for line in lines)
    assert "".join(lines).rstrip("…").replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize(
    ("images", "captions", "marks", "columns"),
    [
        ([], [], [], 1),
        ([None], [], [None], 1),
        ([None], ["a"], [None], 0),
        ([torch.zeros(3, 8, 8, dtype=torch.uint8)], ["a"], [None], 1),
        ([torch.zeros(8, 8, 3)], ["a"], [None], 1),
    ],
)
def test_wrong_grids_are_refused(images: list[Any], captions: list[str], marks: list[Any], columns: int) -> None:
    with pytest.raises(ValueError, match=r"grid|columns|picture"):
        image_grid(images, captions, marks, columns)


def test_save_png_leaves_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "a.png"
    for value in (0, 255):
        save_png(Image.new("RGB", (4, 4), (value, 0, 0)), path)
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]
    with Image.open(path) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


# ---- the page ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and numbers: matplotlib is what takes the time."""
    monkeypatch.setattr(report, "_picture", lambda figure, alt: '<img alt="" src="data:,">')


def drop(rows: list[dict[str, Any]], pattern: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not re.search(pattern, k)} for row in rows]


def many_scores() -> list[dict[str, Any]]:
    extra = {f"{kind}/score{k}{tail}": k / 7 for k in range(5) for kind, tail in (("eval", ""), ("reward", "/mean"))}
    return [row | extra if "eval/scene" in row else row for row in metric_rows(20)]


CASES: dict[str, dict[str, Any]] = {
    "whole": {"rows": metric_rows(30)},
    "one update": {"rows": metric_rows(12, updates=1), "config": CONFIG.format(clip="null", updates=1, iterations=12)},
    "start only": {"rows": metric_rows(0)},
    "first iteration": {"rows": metric_rows(1), "samples": False},
    "no evaluation": {"rows": drop(metric_rows(12), r"^(eval|model)/"), "samples": False},
    "no evaluation at the start": {"rows": metric_rows(12)[1:]},
    "nulls": {
        "rows": [{k: None if k != "iteration" else v for k, v in row.items()} for row in metric_rows(3)],
        "timings": False,
    },
    "some nulls": {
        "rows": [row | {"policy/grad_norm": None} if n == 4 else row for n, row in enumerate(metric_rows(9))]
    },
    "many scores": {"rows": many_scores()},
    "no tags": {"rows": drop(metric_rows(12), r"^eval/\w+/")},
    "only the iteration": {"rows": [{"iteration": 0}, {"iteration": 1}], "samples": False},
    "no samples": {"rows": metric_rows(12), "samples": False},
    "no timings": {"rows": metric_rows(12), "timings": False},
    "no configuration": {"rows": metric_rows(12), "config": ""},
    "no environment": {"rows": metric_rows(12), "environment": None},
    "long": {"rows": metric_rows(1500, eval_every=50), "samples": False},
    "negative scores": {"rows": [{"iteration": n, "eval/jpeg": -20.0 + n, "eval/jpeg/a": -9.0 - n} for n in range(4)]},
}


@pytest.mark.parametrize("name", CASES)
def test_every_run_gets_a_whole_page(name: str, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", **CASES[name])
    before = sorted(p.name for p in folder.iterdir())
    path = write_report(folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted([*before, "report.html"])
    text = path.read_text(encoding="utf-8")
    assert text.count("<section>") == text.count("</section>") >= 2
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script""", text), "an external resource"
    shown = re.sub(r'src="[^"]*"|<style>.*?</style>', "", text, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\binf\b|None", shown)
    for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text):
        assert base64.b64decode(data).rstrip().endswith(b"</svg>")


@pytest.mark.usefixtures("no_charts")
def test_sections_come_in_order(tmp_path: Path) -> None:
    text = write_report(fake_run(tmp_path / "run", metric_rows(12))).read_text(encoding="utf-8")
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Reward", "Samples", "Before and after", "Health", "Costs", "Configuration", "Environment", "Use the weights",
    ]  # fmt: skip
    assert text.count('class="grid"') == 2


@pytest.mark.usefixtures("no_charts")
def test_headline_numbers(tmp_path: Path) -> None:
    rows = metric_rows(10)
    rows[0]["eval/scene_correct"], rows[-1]["eval/scene_correct"] = 0.25, 0.75
    text = write_report(fake_run(tmp_path / "run", rows)).read_text(encoding="utf-8")
    values = re.findall(r'<div class="value">(.*?)</div>', text)
    assert re.sub(r"<.*?>", "", values[0]) == "0.250 → 0.750 +0.500"
    # samples 10 * 12 * 16, evaluations, time 2 * 4.5 + 10 * 5.3, memory, iterations, skipped
    assert values[1:] == ["1,920", "34,560", "1 min 02 s", "1.81 GiB", "10", "0"]


@pytest.mark.usefixtures("no_charts")
def test_a_fall_is_shown_as_a_fall(tmp_path: Path) -> None:
    rows = [{"iteration": n, "eval/a": value} for n, value in enumerate((0.5, 0.9, 0.4))]
    text = write_report(fake_run(tmp_path / "run", rows, samples=False)).read_text(encoding="utf-8")
    assert f'class="pill down">{report.MINUS}0.100' in text
    assert "best 0.900 at iteration 1" in text


@pytest.mark.parametrize(
    ("chosen", "expected"), [("scene_correct", "scene_correct"), ("null", "scene"), ("x", "scene")]
)
def test_main_score(chosen: str, expected: str, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", metric_rows(4), config=f"report:\n  main_score: {chosen}\n", samples=False)
    assert report.Run.read(folder).scores[0] == expected


@pytest.mark.usefixtures("no_charts")
def test_names_are_escaped(tmp_path: Path) -> None:
    rows = [{"iteration": n, "eval/s": 0.5, "eval/s/<b>&": 0.5} for n in range(2)]
    environment = {"command": "python -m recipes.t2i_flux data.prompts='<script>'"}
    folder = fake_run(tmp_path / "run", rows, config="model:\n  path: <i>\n", environment=environment, samples=False)
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "<i></b>" not in text
    assert "&lt;b&gt;&amp;" in text


@pytest.mark.usefixtures("no_charts")
def test_a_broken_picture_is_said_not_shown(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", metric_rows(12))
    path = folder / "samples" / "iteration_000012.png"
    path.write_bytes(path.read_bytes()[:200])
    text = write_report(folder).read_text(encoding="utf-8")
    assert "iteration_000012.png cannot be read" in text
    assert text.count('class="grid"') == 1


def test_heavy_pictures_are_shrunk(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
    save_png(Image.fromarray(noise), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 3_000_000
    assert "data:image/jpeg" in report._grid_image(tmp_path / "a.png", "a")


@pytest.mark.usefixtures("no_charts")
def test_weights_are_loaded_in_the_exporters_own_words(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", metric_rows(2), samples=False)
    assert "pipe.load_lora_weights(&quot;run/weights&quot;)" in write_report(folder).read_text(encoding="utf-8")
    (folder / "weights").mkdir()
    (folder / "weights" / "README.md").write_text('Load:\n\n```python\nload("weights")\n```\n', encoding="utf-8")
    assert "<pre>load(&quot;run/weights&quot;)</pre>" in write_report(folder).read_text(encoding="utf-8")


def broken_folders(root: Path) -> dict[str, Path]:
    empty, no_rows, half, bad = (root / name for name in ("empty", "no_rows", "half", "bad"))
    for folder in (empty, no_rows, half):
        folder.mkdir()
    (no_rows / "metrics.jsonl").touch()
    (half / "metrics.jsonl").write_text('{"iteration": 0, "eva', encoding="utf-8")
    fake_run(bad, metric_rows(1), samples=False, config="a: [1\n b: }")
    return {"missing": root / "missing", "empty": empty, "no rows": no_rows, "half a row": half, "bad config": bad}


@pytest.mark.parametrize("name", ["missing", "empty", "no rows", "half a row", "bad config"])
def test_what_is_no_run_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken_folders(tmp_path)[name]
    with pytest.raises(UserError, match=folder.name):
        write_report(folder)
    with pytest.raises(SystemExit) as stop:
        report.main([str(folder)])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("no_charts")
def test_command_line_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_run(tmp_path / "run", metric_rows(2), samples=False)
    report.main([str(folder)])
    assert Path(capsys.readouterr().out.strip()) == folder / "report.html"


# ---- health --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 4])
def test_a_healthy_run_is_normal(updates: int) -> None:
    findings = health(metric_rows(60, updates=updates))
    assert [f.name for f in findings] == [panel.name for panel in report.PANELS]
    assert [f.name for f in findings if f.ok is not True] == []


@pytest.mark.parametrize("rows", [[], [{"iteration": 0}], metric_rows(0)])
def test_nothing_is_judged_before_it_is_known(rows: list[dict[str, Any]]) -> None:
    assert {f.ok for f in health(rows)} == {None}


def ill(change: Mapping[str, Any], since: int = 1) -> list[dict[str, Any]]:
    return [row | {k: v for k, v in change.items() if n >= since and k in row} for n, row in enumerate(metric_rows(60))]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Policy ratio", {"policy/ratio_first_deviation": 0.003}),
        ("Policy ratio", {"policy/ratio_max_deviation": 2.0}),
        ("Policy ratio", {"policy/ratio_max_deviation": None}),
        ("Clipped samples", {"policy/clipfrac": 0.8}),
        ("Approximate KL", {"policy/approx_kl": 0.3}),
        ("Gradient norm", {"policy/grad_norm": 50.0}),
        ("Gradient norm", {"policy/grad_norm": None}),
        ("Gradient norm", {"policy/skipped_steps": 3}),
        ("Groups without spread", {"group/zero_std_fraction": 0.9}),
        ("Valid scores", {"reward/scene/valid_fraction": 0.5}),
        ("Surrogate variation", {"surrogate/cv": 0.4}),
        ("Surrogate variation", {"surrogate/cv_within": 0.3}),
        ("Prediction size", {"model/velocity_norm_ratio": 1.3}),
        ("Prediction size", {"model/velocity_norm_ratio": 0.7}),
        ("Prediction drift", {"model/velocity_drift": 0.5}),
        ("Prediction drift", {"model/velocity_drift": 0.0}),
    ],
)
def test_every_illness_is_found_where_it_is(name: str, change: dict[str, Any]) -> None:
    assert [f.name for f in health(ill(change, since=31)) if f.ok is False] == [name]


def test_no_gradient_at_all_is_found() -> None:
    found = {f.name: f for f in health(ill({"policy/grad_norm": 0.0}))}["Gradient norm"]
    assert found.ok is False
    assert "nothing could learn" in found.sentence


def test_the_worst_stream_counts() -> None:
    rows = [
        {"iteration": n, "model/velocity_norm_ratio/positions": 1.01, "model/velocity_norm_ratio/atoms": 0.6}
        for n in range(3)
    ]
    found = {f.name: f for f in health(rows)}["Prediction size"]
    assert found.ok is False
    assert "0.600" in found.sentence


@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 1e-7, 12.5, 123.4, 45678.0, 2.5e6, 7e9, -3e9])
def test_numbers_read_back(value: float) -> None:
    text = report.num(value).replace(report.MINUS, "-").replace(",", "")
    scale = 1e9 if text.endswith(" G") else 1e6 if text.endswith(" M") else 1
    assert float(text.rstrip(" GM")) * scale == pytest.approx(value, rel=5e-2)


# ---- in a browser --------------------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium")
PROBE = """<script>addEventListener("load", () => {
  const images = [...document.images], page = document.documentElement;
  page.dataset.images = images.length;
  page.dataset.broken = images.filter(image => image.naturalWidth === 0).length;
  page.dataset.overflow = page.scrollWidth - page.clientWidth;
})</script>"""


def browse(text: str, folder: Path, width: int = 1200) -> tuple[dict[str, int], list[str]]:
    """Load a page in headless Chromium: the probe's counts, and everything written to the console."""
    folder.mkdir()
    page = folder / "page.html"
    probed = text.replace("style-src", "script-src 'unsafe-inline'; style-src").replace("</body>", PROBE + "</body>")
    page.write_text(probed, encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --dump-dom"
    )
    command = [str(BROWSER), *flags.split(), f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600, check=True)
    found = {k: int(v) for k, v in re.findall(r'data-(images|broken|overflow)="(\d+)"', done.stdout)}
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: Debian's package chromium")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_opens_without_error(width: int, tmp_path: Path) -> None:
    text = write_report(fake_run(tmp_path / "run", metric_rows(30))).read_text(encoding="utf-8")
    found, console = browse(text, tmp_path / "browser", width)
    assert console == []
    assert found == {"images": text.count("<img "), "broken": 0, "overflow": 0}
    assert found["images"] == 2 + 3 + len(report.PANELS) + 1  # grids, rewards, health, costs


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: Debian's package chromium")
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    text = write_report(fake_run(tmp_path / "run", metric_rows(2))).read_text(encoding="utf-8")
    broken = text.replace('src="data:image/png;base64,iVBOR', 'src="data:image/png;base64,AAAAA', 1)
    foreign = '<img src="https://example.invalid/a.png"><script>console.error("seen")</script><p style="width:3000px">.'
    found, console = browse(broken.replace("</main>", f"{foreign}</main>"), tmp_path / "browser")
    assert found["broken"] == 2
    assert found["overflow"] > 0
    assert any("seen" in line for line in console)
    assert any("example.invalid" in line for line in console), "the content policy must refuse what is not in the page"
