"""Score the model that sees on pictures that it has not seen, and on the same ones blank or swapped.

    python examples/vision/demo.py                            # what `make demo-vision` runs
    python examples/vision/demo.py --model embedded:vision_early

Each prompt is one picture. A control asks the same question and wants the same answer, but shows an empty picture, or
the next prompt's: what a model scores there it does not owe to its eyes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fsm_rollout as fr

ROOT = Path(__file__).resolve().parents[2]
AGENT = fr.load_agent(ROOT / "configs/agents/look.yaml")

import sums_in_pictures as task  # noqa: E402  # lies beside the agent, where loading it has looked


def scores(model: str, number: int, seed: int = 0) -> dict[str, float]:
    """Return the mean score at temperature 1 on held-back pictures, and on the controls of the same."""
    engine = {"kind": "transformers", "model": model, "threads": 1}
    with fr.Rollout(AGENT, engine, reward="fsm_rollout.rewards:exact_answer", seed=seed) as rollout:
        return {
            shown or "score": rollout.evaluate(
                task.prompts(number, control=shown), sampling={"temperature": 1.0}
            ).score_mean
            for shown in (None, "blank", "swapped")
        }  # fmt: skip


def main() -> None:
    """Print ``score 0.93 (blank 0.05, swapped 0.06)``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:vision", help="default: %(default)s")
    parser.add_argument("--number", type=int, default=256, help="pictures (default: %(default)s)")
    arguments = parser.parse_args()
    found = scores(arguments.model, arguments.number)
    print("score {score:.2f} (blank {blank:.2f}, swapped {swapped:.2f})".format(**found))


if __name__ == "__main__":
    main()
