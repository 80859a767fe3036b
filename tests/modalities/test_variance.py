"""The paper's variance claim on the embedded pipeline (benchmarks/variance.py prints the whole table)."""

import pytest

from benchmarks.variance import measure


@pytest.mark.slow
def test_within_group_variation_falls_threefold() -> None:
    found = {name: row["cv_within"] for name, row in measure(groups=12, size=12).items()}
    ours = found["+ x0, self-normalised (V-GRPO)"]
    assert found["naive"] >= 3 * ours
    for name in ("V-GRPO without sharing", "V-GRPO without stratification", "V-GRPO without normalisation"):
        assert found[name] > 1.2 * ours, f"{name}: {found[name]:.3f} against {ours:.3f}"
