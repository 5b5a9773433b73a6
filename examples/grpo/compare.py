"""Which credit teaches without process supervision, by how much, and that what is wrong shows: a table over seeds.

    python examples/grpo/compare.py --out runs/credit
    python examples/grpo/compare.py --out runs/credit --arms answer --steps 160     # to the end: 20 CPU minutes a seed

All arms know which answers were right, and nothing of the way there: training dialogues end with the first wrong answer
(`until_wrong.yaml`). They differ in what is trained alone. Controls stop at the first step, where the ratio of a token
says that something is wrong; ``--go-on`` trains them nevertheless. A run that is in the folder is not made again, so
the command may be ended and given again, also beside itself with other ``--seeds``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from grpo import Settings, train

from fsm_rollout.statistics.estimates import of_means

SETUP = {"groups": 64, "n": 4, "minibatches": 4, "temperature": 1.3, "agent": "until_wrong", "held_back": 256}
ARMS: dict[str, dict[str, object]] = {
    "sample": {"credit": "sample"},
    "roles": {"credit": "sample", "tools_weight": 0.02},
    "turn": {"credit": "turn"},
    "answer": {"credit": "answer"},
}
CONTROLS: dict[str, dict[str, object]] = {
    "wrong roles": {"credit": "sample", "mask": "tools"},
    "right tree": {"credit": "sample", "tree": "right"},
    "wrong tree": {"credit": "sample", "tree": "wrong"},
}
"""`sample`, with a tree or roles that are wrong; a right tree is the control's control."""


def run(name: str, seed: int, steps: int, out: Path, go_on: bool) -> list[dict[str, float]]:
    """Return the lines of a run's log; train if there is none that ended."""
    folder = out / f"{name.replace(' ', '_')}_{steps}_{seed}"
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    if lines and (("held_back" in lines[-1] and lines[-1]["step"] > 0) or "stopped" in lines[-1]):
        return lines
    made = {**SETUP, **(ARMS | CONTROLS)[name], "seed": seed, "steps": steps, "evaluate_every": 20, "go_on": go_on}
    try:
        return train(Settings(**made), folder)  # type: ignore[arg-type]
    except SystemExit as stopped:  # the ratios are off
        line = {"step": 0, "stopped": str(stopped)}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return [line]


def table(runs: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return what each arm has come to by seed, with the mean over seeds and its interval, and the CPU minutes."""
    lines = [
        "| arm | held back before | after the last step, by seed | mean, 95 % interval | CPU minutes |",
        "|---|---|---|---|---|",
    ]
    for name, of_seeds in runs.items():
        ended = [log for log in of_seeds if "stopped" not in log[-1]]
        lines += [f"| {name} | stopped: {log[-1]['stopped']} | | | |" for log in of_seeds if "stopped" in log[-1]]
        if ended:
            found = of_means(np.array([log[-1]["held_back"] for log in ended]), len(ended))
            interval = "" if math.isnan(found.error) else f" ± {found.margin:.2f}"
            scores, minutes = (
                [f"{log[-1][key]:.{digits}f}" for log in ended]
                for key, digits in (("held_back", 2), ("cpu_minutes", 1))
            )
            cells = [
                f"{ended[0][0]['held_back']:.2f}",
                ", ".join(scores),
                f"{found.value:.2f}{interval}",
                ", ".join(minutes),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/credit"), help="folder of the runs")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *CONTROLS], default=[*ARMS, *CONTROLS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="the learning rate falls to 0 over them; default 20")
    parser.add_argument("--go-on", action="store_true", help="train controls although their ratios are off")
    asked = parser.parse_args()
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for seed in asked.seeds:
        for name in asked.arms:
            runs.setdefault(name, []).append(run(name, seed, asked.steps, asked.out, asked.go_on))
    print(table(runs))


if __name__ == "__main__":
    main()
