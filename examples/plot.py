"""Draws runs of the examples that train, from their logs: held-back success, and a figure of each step.

    python examples/plot.py runs/proofs/*/log.jsonl --out curves.svg
    python examples/plot.py runs/grpo/*/log.jsonl --out curves.svg --figure clipped

A run is called after its folder (or, for a file of another name, after the file); runs whose names differ by a number
at the end are seeds of one thing, and have its colour.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

INK = "#808080"
"""Readable on white and on black."""
TOGETHER = 4
"""Steps of which a mean is drawn: single ones are noisy."""


def draw(logs: Sequence[Path], out: Path, figure: str) -> None:
    """Draw the runs into one file with two panels; its background is transparent."""
    canvas = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = canvas.subplots(1, 2)
    colours: dict[str, str] = {}
    for log in logs:
        lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
        name = re.sub(r"_\d+$", "", log.parent.name if log.name == "log.jsonl" else log.stem).replace("_", " ")
        label = None if name in colours else name
        look = {"color": colours.setdefault(name, f"C{len(colours)}"), "label": label, "linewidth": 1}
        seen = [(line["cpu_minutes"], line["held_back"]) for line in lines if "held_back" in line]
        if seen:
            left.plot(*zip(*seen, strict=True), marker="o", markersize=3, **look)
        values = [line[figure] for line in lines if figure in line]
        spans = [values[max(0, end - TOGETHER) : end] for end in range(1, len(values) + 1)]
        right.plot([sum(span) / len(span) for span in spans], **look | {"label": None if seen else label})
    left.set(xlabel="CPU minutes", ylabel="held-back dialogues right", ylim=(0, 1))
    right.set(xlabel="step", ylabel=f"{figure}, mean of {TOGETHER} steps")
    canvas.legend(loc="outside lower center", ncols=4, labelcolor=INK, frameon=False)
    for axes in (left, right):
        axes.grid(color=INK, alpha=0.3)
        axes.tick_params(colors=INK)
        for part in (axes.xaxis.label, axes.yaxis.label):
            part.set_color(INK)
        for spine in axes.spines.values():
            spine.set_color(INK)
    canvas.savefig(out, transparent=True, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"))
    parser.add_argument("--figure", default="score", help="of each step: score, clipped, …; default score")
    arguments = parser.parse_args()
    draw(arguments.logs, arguments.out, arguments.figure)


if __name__ == "__main__":
    main()
