"""The tables of the reference, made from the code: each function returns Markdown for the marker of its name.

Run as a program (`make reference`) it writes them into the pages, behind their markers; a test compares.

Invariant: nothing here repeats what the code says. Meanings are read from the docstrings of keys, enum members and
classes, and from declarations; the types of the batch's tensors from a batch that is made here.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # where the other modules of the reference are

from reference_python import python_api, python_api_as_text
from reference_tables import (
    docstring,
    engine_arguments,
    first_paragraph,
    keys_table,
    models,
    paragraph,
    shape,
    table,
    words_of,
)  # fmt: skip

from fsm_rollout.names.attribute_docs import attribute_docs

ROOT = Path(__file__).resolve().parents[2]
MARKER = re.compile(r"<!-- reference: (\w+) -->\n(?:.*?<!-- end of reference -->\n)?", re.DOTALL)
"""Where a table stands in a page: the marker of its name, and all up to its end once it was filled in."""


def agent_yaml() -> str:
    """Return every key of an agent's YAML."""
    from fsm_rollout.agent.handlers import load_handler
    from fsm_rollout.agent.json_schema import agent_schema

    # A built-in handler's keys of its own stand beside those of every state.
    definitions = agent_schema()["$defs"] | {"External": load_handler("external").Options.model_json_schema()}
    places = {
        "AgentGraph": "The agent",
        "Context": "`contexts`: each entry",
        "Limits": "`limits`",
        "ToolSpec": "`tools`: each entry",
        "Retry": "`tools`: `retry`",
        "InteractionSpec": "`interaction`",
        "StateSpec": "`states`: each entry",
        "External": "`states`: beside `handler: external`",
        "Sampling": "`sampling`",
        "TransitionSpec": "`transitions`: each one",
        "MCP": "`tools`: `mcp`",
        "Taskset": "`tools`: `verifiers`",
    }
    rest = {name: f"`{name}`" for name in definitions if name not in places}
    return models(places | rest, definitions)


def run_yaml() -> str:
    """Return every key of a run's YAML."""
    from fsm_rollout.engines.specs import KINDS
    from fsm_rollout.jobs.run_schema import run_schema

    definitions = run_schema()["$defs"]
    titles = {
        "RunConfig": "The run",
        "Failures": "`failures`",
        "PolicyFailures": "`failures.policy`",
        "DataFailures": "`failures.data`",
        "ToolFailures": "`failures.tool`",
        "EnvironmentFailures": "`failures.environment`",
        "EngineFailures": "`failures.engine`",
        "InfrastructureFailures": "`failures.infrastructure`",
        "Breaker": "`failures.breaker`",
        "Sampling": "`sampling` and `validation_sampling`",
        "WeightedReward": "`reward`: each of a list",
        "Track": "`track`",
        "PromptSource": "`prompts`: what gives them",
        "ServeConfig": "`serve`",
    }
    engines = {spec.__name__ for spec in KINDS.values()} | {
        "Engine",
        "PoolSpec",
        "RaySpec",
        "Turn",
    }  # on their own page
    rest = {name: f"`{name}`" for name in sorted(definitions.keys() - titles.keys() - engines)}
    return models(titles | rest, definitions)


def prompt_fields() -> str:
    """Return the fields of a prompt."""
    from fsm_rollout.trajectory.prompt import Prompt

    schema = Prompt.model_json_schema()
    rows = [[f"`{name}`", shape(field, schema), field["description"]] for name, field in schema["properties"].items()]
    return table(["field", "value", "meaning"], rows)


def engine_kinds() -> str:
    """Return the keys of every engine kind."""
    from fsm_rollout.engines import common_keys, specs
    from fsm_rollout.engines.scripted import script

    parts = []
    for kind, spec in specs.KINDS.items():
        schema = spec.model_json_schema()
        own = {
            name: field
            for name, field in schema["properties"].items()
            if name not in common_keys.EngineSpec.model_fields
        }
        parts.append(f"## `kind: {kind}`\n\n{keys_table(own, schema, engine_arguments(spec.engine_class))}")
    common = common_keys.EngineSpec.model_json_schema()
    parts.append(f"## Keys of every kind\n\n{keys_table(common['properties'], common)}")
    parts_of_keys = {"pool": common_keys.PoolSpec, "ray": common_keys.RaySpec, "price": common_keys.Price}
    for key, model in parts_of_keys.items():
        schema = model.model_json_schema()
        parts.append(f"### `{key}`\n\n{keys_table(schema['properties'], schema)}")
    schema = script.Turn.model_json_schema()
    parts.append(f"### A turn of a script\n\n{keys_table(schema['properties'], schema)}")
    return "\n\n".join(parts)


def handlers() -> str:
    """Return the built-in handlers."""
    from fsm_rollout.agent.graph import BUILT_IN_STATES
    from fsm_rollout.agent.handlers import checked_handler
    from fsm_rollout.agent.words import HANDLERS

    states = {handler: state for state, handler in BUILT_IN_STATES.items()}
    rows = []
    for name in HANDLERS.built_in:
        handler = checked_handler(name)
        doc = first_paragraph(handler).removeprefix(f"{states.get(name, '')}: ")
        spends = f"`{handler.spends}`" if handler.spends else "–"
        keys = words_of(handler.keys) or "–"
        rows.append(
            [f"`{name}`", f"`{states[name]}`" if name in states else "–", doc, words_of(handler.triggers), spends, keys]
        )
    return table(
        ["handler", "state of that name", "what a visit does", "triggers", "spends on entry", "own keys"], rows
    )


def triggers() -> str:
    """Return the triggers with who raises them."""
    from fsm_rollout.agent.handlers import checked_handler
    from fsm_rollout.agent.words import HANDLERS
    from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger

    meanings = attribute_docs(Trigger)
    rows = []
    for trigger in Trigger:
        raisers = [f"`{name}`" for name in HANDLERS.built_in if trigger in checked_handler(name).triggers]
        meaning = meanings[trigger.name].removeprefix("The scheduler: ")
        implicit = "ends the trajectory" if trigger in IMPLICIT_TRIGGERS else "is a mistake that `check` reports"
        rows.append([f"`{trigger}`", meaning, ", ".join(raisers) or "the scheduler", implicit])
    return table(["trigger", "it says", "raised by", "without a transition it"], rows)


def predicates() -> str:
    """Return the predicates."""
    from fsm_rollout.agent.predicates import PREDICATES

    rows = [
        [f"`{spec.name}`", spec.argument or "nothing", f"{spec.doc}", "yes" if spec.counter else "no"]
        for spec in PREDICATES.values()
    ]
    return table(["predicate", "takes", "holds when", "evaluated by the proof"], rows)


def template_facts() -> str:
    """Return what a state's prompt template may use."""
    from fsm_rollout.agent.handlers import TEMPLATE_FACTS

    return table(["fact", "what it is"], [[f"`{name}`", meaning] for name, meaning in TEMPLATE_FACTS.items()])


def limits() -> str:
    """Return the limits in the order in which they are checked."""
    from fsm_rollout.agent import limits as module
    from fsm_rollout.agent.limits import LIMITS
    from fsm_rollout.trajectory.enums import LimitName

    meanings = attribute_docs(LimitName)
    rows = [
        [
            str(place),
            f"`{name}`",
            meanings[LimitName(name).name],
            f"`{limit.handler}`" if limit.handler else "any",
            "yes" if limit.counted else "no",
        ]
        for place, (name, limit) in enumerate(LIMITS.items(), 1)
    ]
    order = docstring(module).partition("\n\n")[2].partition("\n\n")[2]
    return f"{table(['', 'limit', 'what it counts', 'spent by', 'the proof builds on it'], rows)}\n\n{order}"


def stop_reasons() -> str:
    """Return why trajectories end."""
    from fsm_rollout.trajectory.enums import StopReason

    meanings = attribute_docs(StopReason)
    rows = [[f"`{reason}`", meanings[reason.name]] for reason in StopReason]
    rows += [
        ["`limit:<name>`", "That limit was reached, and no transition took it on."],
        [
            "`failed:<class>`",
            "An error of that class was raised, and no transition took it on. `trajectory.detail` has its text.",
        ],
        ["your own", "The `stop_reason` of the transition that led to the final state."],
    ]
    return table(["stop reason", "meaning"], rows)


def finish_reasons() -> str:
    """Return why generations end."""
    from fsm_rollout.trajectory.enums import FinishReason

    meanings = attribute_docs(FinishReason)
    return table(["finish reason", "meaning"], [[f"`{reason}`", meanings[reason.name]] for reason in FinishReason])


def failure_classes() -> str:
    """Return whose failures there are, if the code tells them apart."""
    from fsm_rollout.trajectory import enums

    classes = getattr(enums, "FailureClass", None)
    if classes is None:
        return ""
    meanings = attribute_docs(classes)
    rows = [[f"`{item}`", meanings.get(item.name, "")] for item in classes]
    return f"## Whose failure it was\n\n{first_paragraph(classes)}\n\n{table(['class', 'meaning'], rows)}"


def rules() -> str:
    """Return the numbered rules of ``check``."""
    from fsm_rollout.agent import verify

    return "\n".join(line for line in docstring(verify).split("\n") if line.startswith("|"))


def batch_tensors() -> str:
    """Return the keys of a batch, with the types of one that is made here."""
    import torch

    batch = small_batch()
    meanings = tensor_meanings()
    rows = []
    keys = list(batch.tensordict.keys())
    for key in keys:
        value = batch.tensordict.get(key)
        if isinstance(value, torch.Tensor):
            rows.append(
                [
                    f"`{key}`",
                    str(value.dtype).removeprefix("torch."),
                    f"`{tensor_shape(batch, value)}`",
                    meanings.get(key, ""),
                ]
            )
    rows.append(["`routed_experts`", "int16", "`[B, P+R, layers, top_k]`", meanings["routed_experts"]])
    columns = [
        [f"`{key}`", meanings.get(key, "")] for key in keys if not isinstance(batch.tensordict.get(key), torch.Tensor)
    ]
    return (
        f"## Tensors\n\n{table(['key', 'type', 'shape', 'meaning'], rows)}\n\n"
        f"## Columns that are no tensors\n\nEach has one value per row.\n\n{table(['key', 'meaning'], columns)}"
    )


def small_batch() -> Any:
    """Return a batch of two rows whose widths differ from each other and from the number of rows."""
    from fsm_rollout import Rollout, load_agent
    from fsm_rollout.model.folders import load_tokenizer, model_folder

    with Rollout(
        load_agent(ROOT / "configs/agents/single_turn.yaml"),
        {"kind": "scripted", "turns": ["The answer is 4."]},
        reward=lambda trajectory: 1.0,
    ) as rollout:
        assert load_tokenizer(model_folder("embedded", ROOT)) is not None
        return rollout.run(["What is 1 + 3?", "And what is 2 + 2, please?"])


def tensor_shape(batch: Any, value: Any) -> str:
    """Return a tensor's shape in B, P and R."""
    rows, prompt = batch.tensordict["prompts"].shape
    response = batch.tensordict["responses"].shape[1]
    names = {rows: "B", prompt: "P", response: "R", prompt + response: "P+R"}
    return f"[{', '.join(names.get(length, str(length)) for length in value.shape)}]"


def tensor_meanings() -> dict[str, str]:
    """Return what each key of a batch holds."""
    from fsm_rollout.batch.columns import PER_TOKEN
    from fsm_rollout.batch.rows import TrainingRow

    fields = {name: re.sub(r"^``\[[^\]]+\]``:? ?", "", text) for name, text in attribute_docs(TrainingRow).items()}
    responses = {key: c for key, c in PER_TOKEN.items() if c.along == "responses" and key != "responses"}
    per_token = {
        key: f"{fields.get(column.field, '').rstrip('.')}. Padded with {column.fill:g}."
        for key, column in responses.items()
    }
    return (
        {
            "prompts": "The stream's tokens before its first sampled one. Padded on the left.",
            "responses": "All later tokens of the stream, sampled or not. Padded on the right.",
            "input_ids": "`prompts` and `responses` side by side.",
            "attention_mask": "1 on tokens, 0 on padding.",
            "position_ids": "The position of each token in its own row, from 0; as verl counts.",
            "trajectory_scores": "The trajectory's score. NaN: it has none, which is not 0.",
            "group_index": "The group's number in this batch, from 0.",
            "group_id": "Which prompt the row comes from.",
            "trajectory_id": "Which trajectory: `group/sample`, and `/call` for an agent used as a tool.",
            "context": "The stream's context.",
            "agent": "The agent that ran.",
            "extra": "The prompt's other fields, as JSON holds them.",
            "tool_rewards": "The rewards that tools gave, in the order of the calls.",
        }
        | per_token
        | {
            name: text
            for name, text in fields.items()
            if name not in ("prompt_ids", "response_ids", "mask", "logprobs")
            and name not in {column.field for column in responses.values()}
        }
    )


def commands() -> str:
    """Return what each command says of itself."""
    import click
    import typer

    from fsm_rollout.cli import app

    group = typer.main.get_command(app)
    context = click.Context(group, info_name="fsm-rollout", terminal_width=100)
    parts = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        text = command.get_help(command.make_context(name, [], parent=context, resilient_parsing=True))
        parts.append(f"## `fsm-rollout {name}`\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def plugin_options() -> str:
    """Return the options that pytest gets."""
    from fsm_rollout.testing.plugin import pytest_plugin

    rows: list[list[str]] = []

    class Group:
        def addoption(self, name: str, **settings: Any) -> None:
            rows.append([f"`{name} {settings.get('metavar', '')}".rstrip() + "`", settings["help"]])

    class Parser:
        def getgroup(self, *names: str) -> Group:
            return Group()

    pytest_plugin.pytest_addoption(Parser())  # type: ignore[arg-type]
    return table(["option", "meaning"], rows)


def errors() -> str:
    """Return the errors of this package, as a tree and one by one."""
    from fsm_rollout import errors as module

    tree = textwrap.dedent(docstring(module).partition("\n\n")[2]).strip("\n")
    rows = [
        [f"`{name}`", f"`{value.__mro__[1].__name__}`", paragraph(value)]
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, module.RolloutError) and value.__module__ == module.__name__
    ]
    sentence, _, drawn = tree.partition("\n\n")
    return (
        f"{sentence}\n\n```text\n{textwrap.dedent(drawn)}\n```\n\n{table(['error', 'derived from', 'meaning'], rows)}"
    )


def chat_rules() -> str:
    """Return the rules of exact tokens that a template may break."""
    from fsm_rollout import chat

    return docstring(chat).partition("\n\n")[2]


def filled(markdown: str, *, on_site: bool = False) -> str:
    """Return a page with its tables; on the site, the Python API is made by mkdocstrings."""

    def content(found: re.Match[str]) -> str:
        made_by: dict[str, Callable[[], str]] = globals() | {
            "python_api": python_api if on_site else python_api_as_text
        }
        return f"<!-- reference: {found[1]} -->\n\n{made_by[found[1]]().strip()}\n\n<!-- end of reference -->\n"

    return MARKER.sub(content, markdown)


def write_pages() -> None:
    """Fill the tables of all pages in."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text("utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, "utf-8")


if __name__ == "__main__":
    write_pages()
