"""The reference of the Python interface: what users import, from its signatures and docstrings.

Invariant: every public name of the package is in it once.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from reference_tables import docstring, first_paragraph, table

API: dict[str, tuple[str, ...]] = {
    "Running": ("fr.Rollout", "fr.load_agent", "fr.read_prompts", "fr.endless_prompts", "fr.Prompt", "fr.picture_of"),
    "What comes out": ("fr.TrajectoryBatch", "fr.Trajectory", "trajectory.stream.AssistantTurn", "fr.Group",
        "fr.Journal",
    ),
    "Reading a journal": ("journal.histories", "journal.read", "journal.events", "journal.trajectory_ids",
        "journal.blob",
    ),
    "Rewards": ("rewards.exact_answer", "rewards.first_answer", "rewards.fraction_answered", "rewards.sum_of_turns",
        "rewards.tool_rewards",
        "rewards.scores_differ",
    ),
    "Tools of your own": ("fr.ToolContext", "fr.ToolResult", "fr.BadArguments", "tools.Tool", "tools.Hidden"),
    "Handlers of your own": ("fr.State", "fr.Outcome", "states.context.HandlerContext"),
    "Users of your own": (
        "interactions.Interaction", "interactions.Conversation", "interactions.Reply",
        "interactions.ScriptedUser", "interactions.ModelUser",
    ),
    "Engines": (
        "engines.protocol.Engine", "engines.protocol.Request", "engines.protocol.SamplingParams",
        "engines.protocol.Chunk", "engines.protocol.Load", "engines.router.Router", "fr.ScriptedEngine",
        "fr.TransformersEngine", "fr.load_model",
    ),
    "Agents of others": ("fr.ForeignVisit",),
    "Agents as data": ("fr.AgentGraph", "fr.verify", "fr.prove"),
    "Testing": (
        "testing.check_engine", "testing.check_state", "testing.check_tool", "testing.check_interaction",
        "testing.check_tool_format", "testing.simulate", "testing.run_virtual",
    ),
    "Exact tokens": ("fr.ChatTemplate",),
    "Errors": ("fr.RolloutError", "fr.ConfigError"),
}  # fmt: skip
"""What users import, by what they are about; ``fr.NAME`` is a public name of the package itself."""
MEMBERS = {
    "Group": (
        "group_id",
        "index",
        "prompt",
        "n",
        "trajectories",
        "children",
        "reward_errors",
        "dropped",
        "drop_reason",
    ),
    "Prompt": ("messages", "prompt_id", "agent", "limits", "sampling", "extra"),
}
"""What is shown of classes that have more."""
IN_BASES = ("fsm_rollout.batch.", "fsm_rollout.rollout", "fsm_rollout.scheduler.trainer_orders")
"""Where there are classes of which some methods stand in their bases."""


def python_api() -> str:
    """Return directives for what users import."""
    import fsm_rollout

    listed = {name for names in API.values() for name in names}
    further = tuple(f"fr.{name}" for name in fsm_rollout.__all__ if f"fr.{name}" not in listed)
    parts = []
    for title, names in [*API.items(), *([("Further", further)] if further else [])]:
        parts.append(f"## {title}")
        for name in names:
            options: dict[str, object] = {"heading_level": 3, "heading": name, "toc_label": name}
            if name.rpartition(".")[2] in MEMBERS:
                options["members"] = list(MEMBERS[name.rpartition(".")[2]])
            if name in ("fr.TrajectoryBatch", "fr.Rollout"):  # of which much stands in their bases
                options["inherited_members"] = True
            lines = "\n".join(f"        {key}: {json.dumps(value)}" for key, value in options.items())
            parts.append(f"::: {where_defined(name)}\n    options:\n{lines}")
    return "\n\n".join(parts)


def python_api_as_text() -> str:
    """Return what users import as the repository shows it: signatures and docstrings (the site has more of each)."""
    import fsm_rollout

    parts = []
    for title, names in API.items():
        parts.append(f"## {title}")
        for name in names:
            home, _, own_name = name.rpartition(".")
            module = fsm_rollout if home == "fr" else importlib.import_module(f"fsm_rollout.{home}")
            value = getattr(module, own_name)
            own = [base for base in getattr(value, "__mro__", ()) if base.__module__.startswith(IN_BASES)] or [value]
            members = MEMBERS.get(own_name) or [key for each in own for key in vars(each) if not key.startswith("_")]
            methods = {
                key: member
                for key in members
                if inspect.isclass(value) and inspect.isfunction(member := getattr(value, key, None))
            }
            text = f"{own_name}{_signature(value)}\n\n{docstring(value)}".strip()
            rows = [[f"`{key}{_signature(method)}`", first_paragraph(method)] for key, method in methods.items()]
            parts.append(
                f"### `{name}`\n\n```text\n{text}\n```" + (f"\n\n{table(['method', 'meaning'], rows)}" if rows else "")
            )
    return "\n\n".join(parts)


def _signature(code: Any) -> str:
    try:
        parameters = inspect.signature(code).parameters.values()
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters if p.name != 'self')})"


def where_defined(name: str) -> str:
    """Return the full path of an object in the module that defines it: what the documentation is read from."""
    import fsm_rollout

    home, _, own_name = name.rpartition(".")
    value = getattr(fsm_rollout if home == "fr" else importlib.import_module(f"fsm_rollout.{home}"), own_name)
    return f"{value.__module__}.{value.__qualname__}"
