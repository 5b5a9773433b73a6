"""Whether an interaction (a simulated user, an environment) can be part of a conversation.

Invariant: the conversation is a real trajectory, a fold of events that grows by what the interaction says and by drawn
assistant turns; the models it asks are drawn, too. Everything runs in virtual time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

from hypothesis import strategies as st

from fsm_rollout.agent.graph import Interaction as Spec
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.chat.messages import check_written
from fsm_rollout.environment.users import BoundInteraction, Conversation, Reply, build_interaction
from fsm_rollout.errors import ToolError
from fsm_rollout.testing.conformance.runner import (
    HOW_TIME_PASSES,
    Check,
    Checked,
    ConformanceError,
    Promise,
    Stepped,
    Subject,
    called,
    demand,
    documented,
    importable,
    run_checks,
    search,
)
from fsm_rollout.testing.simulation.blocked_loop import CallRefused
from fsm_rollout.tools.call import is_async
from fsm_rollout.trajectory.events import AnyEvent, Message, Prompted, Transitioned
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

LATER_SECONDS = 1024.0
"""How much later the same conversation is held again: it must not depend on the clock."""

PROMISES: Mapping[int, Promise] = {
    1: Promise("built", "It can be built from its `kwargs` and the prompt's `interaction_kwargs`."),
    2: Promise("replies", "`reply` returns a `Reply` whose content is text, whatever the model has said."),
    3: Promise("ends", "Within `most_replies` replies one is `done`, and each comes within `patience` seconds."),
    4: Promise("reads only", "Messages, trajectory and the prompt's other fields stay as they are."),
    5: Promise("same rng", "The same conversation with the same `rng` gets the same replies: alone, beside, later."),
    6: Promise("resumed", "Built anew in the middle, as for a resumed trajectory, it goes on as before."),
    7: Promise("cancellation", "Cancellation passes, at every await (where `reply` is async)."),
    8: Promise("event loop", "No task outlives a reply; where `reply` is async, the event loop is never blocked."),
    9: Promise("close", "`close`, if there is one, works after any number of replies, and after none."),
}


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation: what the model says in each turn, what models that are asked answer, whose randomness."""

    turns: tuple[str, ...]
    answers: tuple[str, ...] = ("Go on.",)
    seed: int = 0


_texts = st.sampled_from(["", "Yes.", "The answer is 4.", "Which one?", "é 漢字 🙂", "I cannot do that."])
_scripts = st.builds(
    Script,
    st.lists(_texts, min_size=1, max_size=4).map(tuple),
    st.lists(st.sampled_from(["Go on.", "", "And 3 + 3?", "<done>"]), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3),
)


@documented(PROMISES)
def check_interaction(
    interaction: type[Any] | str | Spec,
    *,
    kwargs: Mapping[str, Any] | None = None,
    interaction_kwargs: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    most_replies: int = 64,
    deterministic: bool = True,
    resumable: bool = True,
    patience: float = 60.0,
    examples: int = 30,
) -> Checked:
    """Hold an interaction to its promises, in generated conversations.

    (promises)

    Example::

        check_interaction(my_users.Customer, interaction_kwargs={"goal": "a refund"}, extra={"answer": "42"})

    Args:
        interaction: the class, its ``module:Class``, or an agent's own (``graph.interaction``).
        kwargs: those of the agent's YAML.
        interaction_kwargs: a prompt's.
        extra: the prompt's other fields.
        most_replies: how long a conversation may be.
        deterministic: whether promise 5 is made.
        resumable: whether promise 6 is made; one with a world of its own (a sandbox) cannot.
        patience: virtual seconds that a reply may take.
        examples: how many conversations each promise is tried on.

    Raises:
        ConformanceError: a promise does not hold; with the shortest conversation that shows it.
    """
    code = interaction.use if isinstance(interaction, Spec) else interaction
    with importable(code) as path:
        spec = Spec(use=path, kwargs=interaction.kwargs if isinstance(interaction, Spec) else kwargs or {})
        make = partial(_Interaction, spec, called(code), examples, interaction_kwargs or {}, extra or {}, patience,
                       most_replies)  # fmt: skip
        unmade = (set() if deterministic else {5, 6}) | (set() if resumable else {6})
        return run_checks(make, PROMISES, [check for check in CHECKS if not unmade.intersection(check.numbers)])


@dataclass(slots=True)
class _World:
    """One conversation, as the trajectory that holds it."""

    script: Script
    extra: Mapping[str, Any]
    events: list[AnyEvent] = field(default_factory=list)
    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "What is 2 + 2?"}])
    questions: int = 0

    def __post_init__(self) -> None:
        self.events.append(
            Prompted(
                at=0.0, trajectory_id="check/0", group_id="check", sample=0, agent="check", initial="GENERATING",
                messages=list(self.messages), extra=dict(self.extra), limits={}, seed=self.script.seed,
                date="2026-01-01T00:00:00",
            )
        )  # fmt: skip

    def enter(self, turn: int) -> Conversation:
        """Let the model say its turn, and enter INTERACTING once more."""
        self.messages.append({"role": "assistant", "content": self.script.turns[turn % len(self.script.turns)]})
        self.events.append(
            Transitioned(
                at=0.0,
                trigger=Trigger.GENERATED,
                source="GENERATING",
                dest="INTERACTING",
                spent={LimitName.USER_TURNS: 1},
            )
        )
        trajectory = Trajectory.fold(self.events)
        rng = Random(f"{self.script.seed}/{turn}")
        return Conversation(
            messages=copy.deepcopy(self.messages), trajectory=trajectory, extra=trajectory.extra, rng=rng, ask=self.ask
        )

    def take(self, reply: Reply) -> None:
        """Take a reply in."""
        if reply.content is not None:
            self.messages.append({"role": "user", "content": reply.content})
        self.events.append(
            Transitioned(at=0.0, trigger=Trigger.REPLIED, source="INTERACTING", dest="GENERATING", spent={})
        )

    async def ask(self, engine: str, messages: Sequence[Message], sampling: Sampling | None = None) -> str:
        """Answer for any model, after a while; the answer depends on how often models have been asked."""
        check_written(messages)
        number, self.questions = self.questions, self.questions + 1
        await asyncio.sleep(0.5)
        return self.script.answers[number % len(self.script.answers)]


class _Interaction(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 8, 3, 8, 7

    def __init__(
        self, spec: Spec, name: str, examples: int, interaction_kwargs: Mapping[str, Any], extra: Mapping[str, Any],
        patience: float, most_replies: int,
    ) -> None:  # fmt: skip
        super().__init__(name, f"{name}.reply", examples)
        self.spec, self.interaction_kwargs, self.extra = spec, interaction_kwargs, extra
        self.patience, self.most_replies = patience, most_replies
        self.first_replies: dict[Script, list[Reply]] = {}
        """The replies in each conversation when it was held for the first time."""
        self.build()
        self.is_async = is_async(cast(Any, load_object(spec.use)).reply)

    def build(self) -> BoundInteraction:
        """Make one for a trajectory."""
        try:
            return build_interaction(self.spec, self.interaction_kwargs)
        except ToolError as error:
            raise ConformanceError(1, f"{self.name} cannot be built: {error}") from error

    async def reply(self, interaction: BoundInteraction, world: _World, turn: int) -> Reply:
        """Get one reply and look at it."""
        # 1. The reply, in time.
        conversation = world.enter(turn)
        before = copy.deepcopy((conversation.messages, conversation.trajectory, conversation.extra))
        stepped = Stepped(interaction.reply(conversation))
        to = f"{self.name}.reply to {world.messages[-1]['content']!r}"
        try:
            async with asyncio.timeout(self.patience):
                reply = await stepped
        except TimeoutError:
            raise ConformanceError(3, f"{to} did not come within {self.patience:g} s; {HOW_TIME_PASSES}") from None
        except CallRefused:
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise ConformanceError(2, f"{to} (reply {turn + 1}) raised {raised}") from error
        # 2. It is text, and changed nothing.
        is_text = reply.content is None or isinstance(reply.content, str)
        demand(is_text, 2, f"{to} has the content {reply.content!r}, no text")
        self.check_busy(stepped)
        after = (conversation.messages, conversation.trajectory, conversation.extra)
        for what, old, new in zip(("messages", "trajectory", "extra"), before, after, strict=True):
            demand(old == new, 4, f"{to} changed the conversation's {what}")
        world.take(reply)
        return reply

    async def close(self, interaction: BoundInteraction) -> None:
        """Close one."""
        try:
            async with asyncio.timeout(self.patience):
                await interaction.close()
        except Exception as error:
            raise ConformanceError(9, f"{self.name}.close raised {type(error).__name__}: {error}") from error

    async def talk(self, script: Script, rebuilt_at: int | None = None, most: int | None = None) -> list[Reply]:
        """Hold one conversation; ``rebuilt_at`` is the turn before which the interaction is made anew."""
        world, interaction, replies = _World(script, self.extra), self.build(), list[Reply]()
        for turn in range(len(script.turns) if most is None else most):
            if turn == rebuilt_at:
                await self.close(interaction)
                interaction = self.build()
            replies.append(await self.reply(interaction, world, turn))
            if replies[-1].done:
                break
        await self.close(interaction)
        return replies

    # -- the checks -----------------------------------------------------------------------------------------------

    def converses(self) -> int:
        """Hold conversations, and close an interaction that never began."""

        def hold(script: Script) -> None:
            async def main() -> None:
                await self.close(self.build())
                self.first_replies.setdefault(script, await self.talk(script))

            self.run(main())

        return search(_scripts, hold, self.examples)

    def ends(self) -> None:
        """Go on until it is done."""
        replies = self.run(self.talk(Script(("Yes.",)), most=self.most_replies))
        done = bool(replies) and replies[-1].done
        demand(done, 3, f"{self.name} was not done after {self.most_replies} replies, the last: {replies[-1:]}")

    def repeats_itself(self) -> int:
        """Hold a conversation twice, and a third time beside another one."""

        def hold(script: Script) -> None:
            other = Script(("Something else.", *script.turns), ("No.",), script.seed + 1)

            async def later() -> list[Reply]:
                await asyncio.sleep(LATER_SECONDS)
                return await self.talk(script)

            async def beside() -> list[Reply]:
                return (await asyncio.gather(self.talk(script), self.talk(other)))[0]

            latest = self.run(self.talk(script))
            first = self.first_replies.setdefault(script, latest)
            again = ("the second time", latest), ("the second time", self.run(later()))
            for when, second in (*again, ("beside another", self.run(beside()))):
                demand(
                    first == second, 5, f"{self.name} answered {script} with {first}, and {when} with {second}; "
                    "take randomness from conversation.rng, read no clock, and keep nothing on the class"
                )  # fmt: skip

        return search(_scripts, hold, self.examples)

    def resumes(self) -> int:
        """Build it anew before each turn but the first."""

        def hold(script: Script) -> None:
            whole = self.run(self.talk(script))
            for turn in range(1, len(whole)):
                replies = self.run(self.talk(script, rebuilt_at=turn))
                demand(
                    replies == whole, 6, f"{self.name} answered {script.turns} with {whole}, but built anew before "
                    f"reply {turn + 1} with {replies}; count by conversation.replies, not on the instance"
                )  # fmt: skip

        return search(_scripts, hold, self.examples)

    def is_cancelled(self) -> int:
        """Cancel the first reply, at each of its awaits in turn."""

        def hold(script: Script) -> None:
            @asynccontextmanager
            async def begin(where: str) -> AsyncIterator[Coroutine[object, object, object]]:
                interaction = self.build()
                try:
                    yield interaction.reply(_World(script, self.extra).enter(0))
                finally:
                    with suppress(Exception):
                        await interaction.close()

            self.cancel_everywhere(begin)

        return search(_scripts, hold, self.share(5))


CHECKS: Sequence[Check[_Interaction]] = (
    Check((1, 2, 4, 8, 9), _Interaction.converses),
    Check((3,), _Interaction.ends),
    Check((5,), _Interaction.repeats_itself),
    Check((6,), _Interaction.resumes),
    Check((7,), _Interaction.is_cancelled, lambda subject: subject.is_async),
)
