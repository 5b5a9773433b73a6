"""Rewards that were written for other trainers, called as these call them.

Invariant: the function is told from its parameters' names alone, and is the user's own, without a line changed. What it
is given is what its trainer gives: verl's ``compute_score`` the text of the whole response and the prompt's ground
truth, TRL's the prompts and completions of a group with a list for each column.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import Stream, root_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

VERL = {"solution_str", "ground_truth"}  # what tells a `compute_score`
TRL = "completions"  # what tells a reward of TRL's
GIVEN_BY_TRL = {"prompts", TRL, "completion_ids", "trainer_state", "log_extra", "log_metric"}


@dataclass(frozen=True, slots=True)
class ForeignReward:
    """A reward of another trainer as one of ours."""

    function: Callable[..., object]
    """Called with a trajectory, or with a group."""
    of_group: bool
    reads: tuple[str, ...]
    """The prompt's fields that it cannot do without."""


def as_foreign(function: Callable[..., object], signature: inspect.Signature) -> ForeignReward | None:
    """Return a reward of verl's or TRL's as one of ours; ``None`` for any other function."""
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def taken(arguments: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in arguments.items() if takes_all or name in parameters}

    if parameters.keys() >= VERL:
        return ForeignReward(lambda trajectory: function(**taken(_of_verl(trajectory))), False, ("answer",))
    if TRL not in parameters or parameters[TRL].default is not inspect.Parameter.empty:
        return None
    named = {
        name for name, each in parameters.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }
    return ForeignReward(lambda group: function(**taken(_of_trl(group))), True, tuple(sorted(named - GIVEN_BY_TRL)))


def _response(trajectory: Trajectory) -> list[Message]:
    """Return all messages after the opening ones: the model's turns, tools' results, users' replies."""
    return [message for stream in _main(trajectory) for message in stream.messages[stream.opening :]]


def _main(trajectory: Trajectory) -> list[Stream]:
    return [stream for stream in trajectory.streams if root_of(stream.context) == MAIN]


def _said(trajectory: Trajectory) -> str:
    return "\n".join(text_of(message) for message in _response(trajectory))


def _of_verl(trajectory: Trajectory) -> dict[str, object]:
    extra = trajectory.extra
    judged = extra.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    return {
        "data_source": extra.get("data_source"),
        "solution_str": _said(trajectory),
        "ground_truth": extra.get("answer") if truth is None else truth,
        "extra_info": extra.get("extra_info") or {},
    }


def _of_trl(group: Sequence[Trajectory]) -> dict[str, object]:
    extras = [trajectory.extra for trajectory in group]
    columns = {
        name: [extra.get(name) for extra in extras] for name in dict.fromkeys(key for extra in extras for key in extra)
    }
    texts = isinstance(extras[0].get("prompt"), str)  # a data set of texts: TRL gives texts
    return columns | {
        "prompts": columns.get("prompt") if texts else [list(trajectory.prompt_messages) for trajectory in group],
        "completions": [_said(trajectory) if texts else _response(trajectory) for trajectory in group],
        "completion_ids": [
            [token for stream in _main(trajectory) for token in stream.tokens.response_ids().tolist()]
            for trajectory in group
        ],
        "trainer_state": None,
        "log_extra": _ignored,
        "log_metric": _ignored,
    }


def _ignored(*_: object) -> None:
    """Take what a reward would have its trainer log."""
