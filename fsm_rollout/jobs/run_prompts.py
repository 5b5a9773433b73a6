"""Where a run's prompts come from, as its YAML says it: a file, one with columns of its own names, or a function.

Invariant: the three are told apart by their form alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Discriminator, Field, Tag, model_validator

from fsm_rollout.agent.words import gathered, named_by_one_word
from fsm_rollout.names.registry import Registry
from fsm_rollout.trajectory.settings import FreeForm, ImportPath, Named, StrictModel

# What gives prompts and is named by one word, with its arguments beside it.
PROMPT_SOURCES = Registry(
    "prompt source",
    "fsm_rollout.prompts",
    {
        "verifiers": "fsm_rollout.environment.verifiers:prompts",
        "datasets": "fsm_rollout.environment.hub_datasets:prompts",
    },
    "module:function",
)


class PromptSource(StrictModel):
    """Prompts that a function gives."""

    use: ImportPath
    """the function, as `module:function`; or `verifiers`, whose arguments (`taskset`, `config`) stand beside it; or
    `datasets`, for the hub's: `{use: datasets, path: openai/gsm8k, name: main, messages: question}`"""
    kwargs: FreeForm = Field(default_factory=dict)
    """its arguments; one that takes `limit` is given the run's"""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: object) -> object:
        return named_by_one_word(value, PROMPT_SOURCES, cls)


class PromptFile(StrictModel):
    """A file of prompts whose columns have names of their own."""

    file: Path
    """a .jsonl, .json or .parquet file"""
    columns: Named[str] = Field(default_factory=dict)
    """which column each field of a prompt is, also written beside `file`: `messages: question`; dots lead into a
    column: `answer: reward_model.ground_truth`"""

    @model_validator(mode="before")
    @classmethod
    def _beside(cls, value: object) -> object:
        return gathered(value, cls, "columns") if isinstance(value, Mapping) else value


def _kind_of_prompts(value: object) -> str:
    if isinstance(value, PromptFile) or (isinstance(value, Mapping) and "file" in value):
        return "<columns>"
    return "<source>" if isinstance(value, Mapping | PromptSource) else "<file>"


Prompts = Annotated[
    Annotated[Path, Tag("<file>")] | Annotated[PromptSource, Tag("<source>")] | Annotated[PromptFile, Tag("<columns>")],
    Discriminator(lambda value: _kind_of_prompts(value)),
]
