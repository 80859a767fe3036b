"""Torsion angles: the adapter that docs/adding_a_modality.md builds. Its code lives on that page, and only there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_modality.md"


def blocks(page: str) -> list[tuple[str | None, str]]:
    """The python blocks of a page in order, each with the title of the file that it is part of."""
    found = re.findall(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    return [(title or None, code) for title, code in found]


def source(page: str, title: str) -> str:
    """The file of this title: its blocks, with the blank lines that PEP 8 has between methods and between classes."""
    mine = [code for name, code in blocks(page) if name == title]
    return mine[0] + "".join(("\n" if code.startswith(" ") else "\n\n") + code for code in mine[1:])


exec(compile(source(PAGE.read_text(encoding="utf-8"), "torus.py"), str(PAGE), "exec"))
