"""The base of all state handlers, built-in or a user's own.

Invariant: a handler keeps no state of any trajectory (one instance serves them all); what it does goes through the
visit, which records it as events and charges it against the limits; and it never says which state comes next, only
the outcome of its visit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ValidationError

from fsm_rollout.agent.graph import StateSpec
from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.trajectory.config_errors import explanations
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class State(ABC):
    """What a visit of one working state does.

    Subclass it for a handler of your own and name it in the YAML as ``handler: module:Class``. Declare the triggers
    that :meth:`run` may raise, so that the graph can be checked and the agent proven to end; a handler that ``spends``
    no limit needs a ``max_visits`` in every cycle it is part of. ``Options``, a pydantic model, declares YAML keys of
    its own; they arrive as ``self.options``, the state's other keys as ``self.spec``::

        class Draft(State):
            triggers = ("good", "poor")
            spends = "assistant_turns"

            class Options(BaseModel):
                min_words: int = 20

            async def run(self, trajectory, ctx):
                await ctx.generate(self.spec.context)
                words = len(trajectory.text.split())
                ctx.score_turn(min(1.0, words / self.options.min_words))
                if words >= self.options.min_words:
                    return Outcome("good")
                more = {"role": "user", "content": f"Only {words} words. Write more."}
                ctx.write([more], context=self.spec.context)
                return Outcome("poor")

    What ``ctx`` offers (:class:`fsm_rollout.states.context.HandlerContext` says what each costs, gives and raises):

    - ``await generate(context, sampling=None)``: one assistant turn. Its text is then ``trajectory.text``, the calls
      that it attempts are ``trajectory.attempts``.
    - ``await call_tool(attempt)``: carries out one of those; the model is told with ``write``.
    - ``write(messages, context=…)``: appends messages, which the next generation answers.
    - ``score_turn(value, turn=None)``: scores the latest turn, or another.
    - ``await ask(engine, messages, sampling=None)``: a text from a model on a named engine; in no stream, not charged.
    - ``await interact(context)``: the reply of the state's interaction.
    - ``charge(limit)``, ``check(limit)``, ``remaining(limit)``: spend a limit, or see what is left.
    - ``rng``, ``clock()``, ``resumed``: random numbers and a time that replay; whether the visit has begun again.
    - ``facts()``: what a ``prompt`` template may use (:data:`fsm_rollout.agent.handlers.TEMPLATE_FACTS`): ``agent``,
      ``state``, ``messages``, ``task``, ``text``, ``texts``, ``history``, ``pictures``, ``extra``, ``visits``,
      ``spent``, ``generations``, ``score``, ``turn_scores``.
    """

    triggers: ClassVar[tuple[str, ...]] = ()
    """The triggers that :meth:`run` may raise."""
    spends: ClassVar[str | None] = None
    """The limit that each visit is charged at least 1 of on entry; ``None``: a visit may be free."""
    keys: ClassVar[tuple[str, ...]] = ("sampling", "options")
    """Of the YAML keys that only some handlers use, those that this one uses."""
    Options: ClassVar[type[BaseModel] | None] = None

    def __init__(self, name: str, spec: StateSpec) -> None:
        self.name = name
        self.spec = spec
        self.options = self._read_options(spec.options)

    def _read_options(self, options: Mapping[str, object]) -> BaseModel | None:
        try:
            if self.Options is not None:
                return self.Options(**options)
        except ValidationError as error:
            explained = explanations(error, self.Options, ("states", self.name))
            raise ConfigError([Problem(message) for _, message in explained]) from None
        if options:
            key = next(iter(options))
            raise ConfigError(f"state '{self.name}': unknown key '{key}'; its handler takes no keys of its own")
        return None

    @abstractmethod
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Do the state's work and return one of the declared triggers as an outcome.

        After a suspension or a crash it runs again from its start, and what the visit had recorded is not done twice:
        the same operations return what they returned. So let its steps follow from the trajectory and ``ctx.rng``.

        Any exception, SystemExit too, becomes the trigger ``failed``. A timeout cancels it: let the CancelledError
        through, or the visit cannot be ended. Tasks that it starts must have ended when it returns.
        """

    def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:  # noqa: B027  # optional, most need nothing
        """Finish what a timed-out visit left open (synchronously, before ``timed_out`` is routed)."""
