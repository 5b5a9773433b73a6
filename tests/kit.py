"""What tests share: where the repository's files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
CONFIGS = ROOT / "configs"
