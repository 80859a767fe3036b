"""Adapters, one file a model family, and the embedded pipelines."""

from pathlib import Path

EMBEDDED_FLUX = Path(__file__).parent / "embedded" / "flux"
