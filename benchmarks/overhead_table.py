"""All that the rollout layer costs, in one table and one plot: :mod:`overhead` over and over, each beside its measure.

    python benchmarks/overhead_table.py --workload DIR --peer VENV --out table.md --plot plot.svg
    python benchmarks/overhead_table.py --n 256 --only tools           # without verl, and only some lines of the table
    python benchmarks/overhead_table.py --n 16 --rounds 1 --plot plot.svg   # whether all of it runs, in a few minutes

A line of the table is two commands that are run in turn (A B A B), each time in processes of their own, and the ratio
of their medians. Without ``--peer`` the lines beside verl are left out. CPU times hold on a busy machine; for the lines
that say "wall" nothing else may run. A line that fails says so in the table, and on stderr why; the rest goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from overhead import parsed
from overhead_beside import commands, in_turn


@dataclass(frozen=True)
class Line:
    """One line of the table: a figure of a command, against that of another one."""

    what: str
    key: str
    ours: str
    """Options of :mod:`overhead`; ``N`` stands for ``--n`` of this command, which bounds other numbers of trajectories
    too, and ``10N`` for ten times as many."""
    against: str | None
    """Those of the command that it is measured by, on this side; ``None``: verl with the same options."""
    goal: float
    """The ratio is to be at most so much (of rates, marked by ``more``, at least)."""
    more: bool = False


LINES = (
    Line("CPU per generation", "us_cpu_per_gen", "--n N", None, 0.10),
    Line("CPU per generation, 30 tools", "us_cpu_per_gen", "--n N --extra-tools 29 --prompt-length 4096", None, 0.03),
    Line("the same, against one tool", "us_cpu_per_turn", "--n N --extra-tools 29", "--n N", 1.05),
    Line("CPU per generation with a journal, against none", "us_cpu_per_gen", "--n N --journal", "--n N", 1.1),
    # Three times: the first batch of a process meets memory that the machine has still to give it.
    Line("batch of width 16,384 (wall)", "batch_ms", "--n 256 --response-length 16384 --reps 3", None, 0.05),
    Line("512 x 0.2 s x 5, two workers (wall)", "wall_s", "--n 512 --delay 0.2 --workers 2", None, 0.45),
    Line("CPU per turn at 100k tokens, against 1k", "us_cpu_per_turn",
         "--n 16 --turns 32 --context 100000", "--n 16 --turns 32 --context 1000", 1.1),
    Line("CPU per generation, ten times as many at once", "us_cpu_per_gen",
         "--n 10N --prompt-length 256 --response-length 640 --reps 1",
         "--n N --prompt-length 256 --response-length 640 --reps 1", 1.2),
    Line("trajectories/s of two workers, against one (wall)", "traj_per_s",
         "--n N --workers 2", "--n N --workers 1", 1.8, more=True),
    Line("through Ray (wall)", "us_wall_per_gen", "--mode ray --n 512 --workers 2", None, 0.2),
    Line("kB of a trajectory under way, without its tokens", "kb_per_trajectory", "--n N --reps 1", None, 20.0),
)  # fmt: skip
SWEEPS: Mapping[str, tuple[str, str, Sequence[int]]] = {
    "tokens of context": ("--n 16 --turns 32 --context {}", "us_cpu_per_turn", (1_000, 10_000, 30_000, 100_000)),
    "further tools": ("--n 512 --extra-tools {}", "us_cpu_per_turn", (0, 9, 29, 99)),
    "trajectories at once": ("--n {}N/16", "us_cpu_per_gen", (1, 4, 16, 64)),
    "workers": ("--n N --workers {}", "us_cpu_per_gen", (1, 2, 3)),
}
"""What is varied, in which command, and the figure to look at; of trajectories, in sixteenths of ``N``."""


def options_of(text: str, table: argparse.Namespace) -> argparse.Namespace:
    """Return the options of one command of the table."""
    words = text.split()
    if "--n" in words:
        at = words.index("--n") + 1
        number, of_n, divisor = words[at].partition("N")
        count = int(number or 1) * table.n // int(divisor[1:] or 1) if of_n else min(int(number), table.n)
        words[at] = str(max(1, count))
    options = parsed([*(["--reps", str(table.reps)] if "--reps" not in words else []), *words])
    options.workload, options.peer = table.workload, table.peer or Path()
    return options


def measured(line: Line, table: argparse.Namespace) -> str | None:
    """Return a line of the table as Markdown; ``None`` if it takes verl, and there is none."""
    sides = commands(options_of(line.ours, table), batch=line.key == "batch_ms")
    if line.key == "kb_per_trajectory":  # a figure by itself
        value = in_turn({"ours": sides["ours"]}, 1)["ours"][line.key]
        return _written(line, value, None, value)
    if line.against is not None:
        sides = {"ours": sides["ours"], "measure": commands(options_of(line.against, table))["ours"]}
    elif table.peer is None:
        return None
    ours, measure = (figures[line.key] for figures in in_turn(sides, table.rounds).values())
    return _written(line, ours, measure, ours / measure)


def _written(line: Line, ours: float, measure: float | None, ratio: float) -> str:
    met = ratio >= line.goal if line.more else ratio <= line.goal
    beside = "" if measure is None else f"{measure:,.5g}" + (" (verl)" if line.against is None else "")
    sign = "\u2265" if line.more else "\u2264"
    figures = f"{ours:,.5g} | {beside} | {'' if measure is None else f'{ratio:.3g}'}"
    return f"| {line.what} | `{line.key}` | {figures} | {sign} {line.goal:g} | {'yes' if met else 'no'} |"


def plot(path: Path, table: argparse.Namespace) -> None:
    """Draw the cost against what it might grow with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (name, (command, key, values)) in zip(figure.subplots(2, 2).flat, SWEEPS.items(), strict=True):
        axes.set(xlabel=name, ylabel=f"\u00b5s CPU per {key.rpartition('_')[2].replace('gen', 'generation')}")
        options = [options_of(command.format(value), table) for value in values]
        try:
            found = in_turn({str(v): commands(o)["ours"] for v, o in zip(values, options, strict=True)}, table.rounds)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            axes.text(0.5, 0.5, "failed", transform=axes.transAxes, ha="center")
            continue
        shown = [sized.n for sized in options] if "{}N" in command else values
        costs = [found[str(value)][key] for value in values]
        axes.plot(shown, costs, marker="o", color="#4059ad")
        axes.set_ylim(0, 1.1 * max(costs))
        if name != "workers" and 0 not in shown:
            axes.set_xscale("log")
        axes.set_xticks(shown, [f"{value:,}" for value in shown])
        axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)  # what follows takes minutes


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2048, help="trajectories at once, where a line does not say otherwise")
    parser.add_argument("--reps", type=int, default=1, help="runs in each process")
    parser.add_argument("--rounds", type=int, default=2, help="how often both sides are run in turn")
    parser.add_argument("--only", default="", help="only the lines that contain this text")
    parser.add_argument("--workload", type=Path, help="the folder of the neutral workload")
    parser.add_argument("--peer", type=Path, help="an environment with verl")
    parser.add_argument("--out", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, help="draw the plot there")
    table = parser.parse_args()
    head = "| workload | figure | here | against | ratio | goal | met |"
    lines = [f"Measured on {datetime.now(UTC):%Y-%m-%d}.", "", head, "|---" * head.count(" | ") + "|---|"]
    print(*lines, sep="\n", flush=True)
    for line in LINES:
        try:
            written = measured(line, table) if table.only in line.what else None
        except RuntimeError as error:
            print(f"{line.what}: {error}", file=sys.stderr, flush=True)
            written = f"| {line.what} | `{line.key}` | failed | | | | no |"
        if written is not None:
            lines.append(written)
            print(written, flush=True)
            if table.out is not None:  # each line as it comes: the next may take minutes
                table.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if table.plot is not None:
        plot(table.plot, table)


if __name__ == "__main__":
    sys.exit(main())
