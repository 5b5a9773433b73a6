"""One line for each run folder: what a harness did to its rows, and how far the engine's log-probs are off.

    python examples/recipes/table.py runs/codex runs/opencode [--model FOLDER]

With ``--model``, the weights that sampled, the log-probs of all trained tokens are computed anew over whole rows by
transformers, in float32; ``KL`` is the estimator k3 in nats per token.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import fsm_rollout as fr
from fsm_rollout.batch.rows import TrainingRow


def kl(rows: Iterable[TrainingRow], model: str | Path) -> float:
    """Compute trained tokens' log-probs anew, row by row, and compare: nats per token."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])[None]
        start = len(row.prompt_ids)
        with torch.no_grad():
            hidden = network.model(ids).last_hidden_state[0, start - 1 : -1]
            own = network.lm_head(hidden).log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        mask = torch.tensor(row.mask, dtype=torch.bool)
        ratio = (own - torch.tensor(row.logprobs))[mask].double()
        total += float((ratio.exp() - 1 - ratio).sum())
        count += int(mask.sum())
    return total / count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--model")
    options = parser.parse_args()
    print("| run | rows per rollout | forks | score | tokens per rollout | trained | seconds per rollout | KL |")
    print("|---|---|---|---|---|---|---|---|")
    for run in options.runs:
        summary, batch = json.loads((run / "summary.json").read_text()), fr.TrajectoryBatch.load(run / "batch")
        rollouts, rows = summary["trajectories"], batch.rows()
        forks = ", ".join(f"{name} {count / rollouts:g}" for name, count in summary.get("forks", {}).items()) or "–"
        tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        seconds = sum(row.metrics["wall_seconds"] for row in rows) / len(rows)
        score = "–" if summary["score_mean"] is None else f"{summary['score_mean']:.2f}"
        print(
            f"| {run.name} | {len(rows) / rollouts:.2f} | {forks} | {score} | {tokens / rollouts:,.0f} "
            f"| {summary['trained_tokens'] / rollouts:,.0f} | {seconds:.1f} "
            f"| {f'{kl(rows, options.model):.1e}' if options.model else '–'} |"
        )


if __name__ == "__main__":
    main()
