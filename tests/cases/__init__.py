"""Tables of cases: what is given, and what is said of it."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def table(name: str) -> dict[str, Any]:
    """Return the table in the file ``name.yaml`` here; it is read once, and nobody changes it."""
    data: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text("utf-8"))
    return data


FILES: dict[str, str] = table("files")  # what users write, by name


def says(expected: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether the lines are those expected; ``…`` stands for any text, and on its own for any lines."""
    pattern = "".join(r"(.*\n)*" if text == "…" else re.escape(text).replace("…", ".*") + r"\n" for text in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None
