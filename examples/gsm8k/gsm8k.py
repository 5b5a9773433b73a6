"""GSM8K (Cobbe and others, arXiv 2110.14168) as prompts: a question, and as `answer` the number after its solution."""

from __future__ import annotations

from itertools import islice

import fsm_rollout as fr
from fsm_rollout.environment import hub_datasets


def prompts(split: str = "train", limit: int | None = None) -> list[fr.Prompt]:
    """Return the problems of a split; needs the package `datasets`, and the data set from the hub or in its cache."""
    found = hub_datasets.prompts("openai/gsm8k", "main", split, messages="question")
    return [
        prompt.model_copy(update={"answer": str(prompt.extra["answer"]).rpartition("####")[2].strip().replace(",", "")})
        for prompt in islice(found, limit)
    ]


def held_back(limit: int | None = None) -> list[fr.Prompt]:
    """Return problems of the test split."""
    return prompts("test", limit)
