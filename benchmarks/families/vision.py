"""Processor files of the tiny vision models: small images, few tokens."""

from __future__ import annotations

from pathlib import Path

from benchmarks.families.table import Family


def write_processor(family: Family, folder: Path) -> None:
    """Write the files that vLLM's multimodal processor of the family reads."""
