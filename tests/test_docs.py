"""The code on the documentation pages is run, in order, so that it cannot rot."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.toys.torus import PAGE, blocks, source

TEXT = PAGE.read_text(encoding="utf-8")


def test_adding_a_modality_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "torus"}
    exec(compile(source(TEXT, "torus.py"), "torus.py", "exec"), namespace)
    steps = [code for title, code in blocks(TEXT) if title is None]
    assert len(steps) == 4
    for number, code in enumerate(steps, 1):
        exec(compile(code, f"{PAGE.name}, step {number}", "exec"), namespace)
    assert float(namespace["after"]) > float(namespace["before"])


def test_every_python_block_of_the_page_is_found() -> None:
    assert len(blocks(TEXT)) == TEXT.count("```python")


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_the_file_on_the_page_is_lint_free(tmp_path: Path) -> None:
    file = tmp_path / "torus.py"
    file.write_text(source(TEXT, "torus.py"), encoding="utf-8")
    config = PAGE.parents[1] / "pyproject.toml"
    for command in (["check"], ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(config), str(file)]
        out = subprocess.run(ruff, capture_output=True, text=True, timeout=60)
        assert out.returncode == 0, out.stdout
