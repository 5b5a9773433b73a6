"""Where state handlers are found, and what each of them declares.

Invariant: a handler declares its triggers, what a visit spends and its own keys once, as attributes of its class;
built-in handlers and a user's own alike. They are found by name (``module:Class``), so an agent is checked and drawn
without importing an engine.
"""

from __future__ import annotations

import inspect
from typing import ClassVar, Protocol

from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.agent.words import HANDLERS
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.names.objects import load_object
from fsm_rollout.trajectory.enums import SCHEDULERS_TRIGGERS


class Handler(Protocol):
    """What the class of a handler declares.

    ``spends`` names the limit that every visit is charged at least 1 of on entry, or ``None`` when a visit may be
    free: a cycle of free states is only bounded by ``max_visits``.
    ``keys`` are the YAML keys of a state that mean something only to this handler.
    """

    triggers: ClassVar[tuple[str, ...]]
    spends: ClassVar[str | None]
    keys: ClassVar[tuple[str, ...]]


# The names that a state's `prompt` template may use, with what they are.
TEMPLATE_FACTS = {
    "agent": "the agent's name",
    "state": "the state's name",
    "messages": "the prompt's messages",
    "task": "the text of the last of them",
    "text": "the latest turn's text",
    "texts": "the turns' texts, by context",
    "history": "the messages so far, by context",
    "pictures": "the pictures shown so far, each once: `{{ pictures[0] }}` shows the first again",
    "extra": "the prompt's other fields",
    "visits": "how often each state was visited; a visit that a limit kept from running is none",
    "spent": "how much of each counted limit is spent",
    "generations": "how many generations there have been",
    "score": "the trajectory's score, if any",
    "turn_scores": "(turn, score) of each turn that was scored",
}


def load_handler(handler: str) -> type:
    """Return the class of a built-in handler, or of ``module:Class``; ConfigError if there is no such class."""
    found = HANDLERS.find(handler)
    if not isinstance(found, type):
        raise ConfigError(f"handler '{handler}' is a {type(found).__name__}; name a class, derived from State")
    return found


def checked_handler(handler: str) -> type[Handler]:
    """Return a handler's class, once it is known to declare what it must.

    Raises:
        ConfigError: as :func:`load_handler`; or it is not a class of :class:`fsm_rollout.State` that declares
            ``triggers`` and can run.
    """
    found = load_handler(handler)
    if (problem := _problem_with(found)) is not None:
        raise ConfigError(f"handler '{handler}': {problem}")
    return found


def _problem_with(handler_class: type) -> str | None:
    # 1. What it declares.
    triggers, spends = getattr(handler_class, "triggers", ()), getattr(handler_class, "spends", None)
    if not isinstance(triggers, tuple) or not triggers or not all(isinstance(trigger, str) for trigger in triggers):
        return f"the class must declare `triggers`, a tuple of names; got {triggers!r}"
    if raised := sorted(SCHEDULERS_TRIGGERS.intersection(triggers)):
        return f"the scheduler alone raises {', '.join(raised)}; give it another name"
    if spends not in (None, *COUNTED_LIMITS):
        hint = did_you_mean(str(spends), COUNTED_LIMITS)
        return f"`spends` must be a counted limit or None, got {spends!r}{hint}"
    keys = getattr(handler_class, "keys", ())
    if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
        return f"`keys` must be a tuple of YAML keys, as ('sampling',); got {keys!r}"
    # 2. That it can run.
    base = load_object("fsm_rollout.states.base:State")
    if not isinstance(base, type) or not issubclass(handler_class, base):
        return "derive the class from fsm_rollout.State"
    if missing := sorted(getattr(handler_class, "__abstractmethods__", ())):
        return f"the class lacks {', '.join(missing)}"
    remedy = "write it as `async def run(self, trajectory, ctx)`"
    run = getattr(handler_class, "run")  # noqa: B009  # there is one: it is not abstract
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        return f"its `run` is not async; {remedy}"
    try:
        inspect.signature(run).bind(None, None, None)
    except TypeError as error:
        return f"its `run` cannot be called ({error}); {remedy}"
    return None
