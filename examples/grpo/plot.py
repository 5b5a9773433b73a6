"""Draws runs of grpo.py: held-back success, and the fraction of clipped tokens before the first update of a step.

    python examples/grpo/plot.py runs/grpo/*/log.jsonl --out curve.svg

Each line is called after its folder (or, for a file of another name, after the file).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

INK = "#808080"
"""Readable on white and on black."""


def draw(logs: list[Path], out: Path) -> None:
    """Draw the runs into one file with two panels; its background is transparent."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    success, clipped = figure.subplots(1, 2)
    for log in logs:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        name = log.parent.name if log.name == "log.jsonl" else log.stem
        seen = [line for line in lines if "held_back" in line]
        minutes = [line["cpu_minutes"] for line in seen]
        success.plot(minutes, [line["held_back"] for line in seen], marker="o", label=name.replace("_", " "))
        steps = [line for line in lines if "clipped" in line]
        clipped.plot([line["step"] for line in steps], [line["clipped"] for line in steps])
    success.set(xlabel="CPU minutes", ylabel="held-back dialogues solved", ylim=(0, 1))
    clipped.set(xlabel="step", ylabel="tokens clipped before any update", ylim=(-0.02, 0.5))
    figure.legend(loc="outside lower center", ncols=3, labelcolor=INK, frameon=False)
    for axes in (success, clipped):
        axes.grid(color=INK, alpha=0.3)
        axes.tick_params(colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        for spine in axes.spines.values():
            spine.set_color(INK)
    figure.savefig(out, transparent=True, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("curve.svg"))
    arguments = parser.parse_args()
    draw(arguments.logs, arguments.out)


if __name__ == "__main__":
    main()
