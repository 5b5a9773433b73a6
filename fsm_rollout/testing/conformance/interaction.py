"""Whether an interaction (a simulated user, an environment) can be part of a conversation.

Invariant: the conversation is a real trajectory, a fold of events that grows by what the interaction says and by drawn
assistant turns; the models it asks are drawn, too. Everything runs in virtual time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from hypothesis import strategies as st

from fsm_rollout.agent.graph import Interaction as Spec
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.chat.messages import check_written
from fsm_rollout.environment.users import BoundInteraction, Conversation, Reply, build_interaction
from fsm_rollout.errors import ToolError
from fsm_rollout.testing.conformance.promises import (
    BlockedLoop,
    Checked,
    ConformanceError,
    Stepped,
    called,
    cancelled_at,
    importable,
    search,
)
from fsm_rollout.testing.simulation.blocking import HOW_TIME_PASSES, busy, in_virtual_time
from fsm_rollout.tools.call import STOP_SECONDS, is_async
from fsm_rollout.trajectory.events import Message, Prompted, Transitioned
from fsm_rollout.trajectory.reasons import Trigger
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

MOST_WAITS = 40
"""A reply is cancelled at each of its awaits, up to this many."""
LATER_SECONDS = 1024.0
"""How much later the same conversation is held again: it must not depend on the clock."""

_said = st.sampled_from(["", "Yes.", "The answer is 4.", "Which one?", "é 漢字 🙂", "I cannot do that."])


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation: what the model says in each turn, what models that are asked answer, whose randomness."""

    turns: tuple[str, ...]
    answers: tuple[str, ...] = ("Go on.",)
    seed: int = 0


_scripts = st.builds(
    Script,
    st.lists(_said, min_size=1, max_size=4).map(tuple),
    st.lists(st.sampled_from(["Go on.", "", "And 3 + 3?", "<done>"]), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3),
)


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

    1. It can be built for a trajectory, from its ``kwargs`` and the prompt's ``interaction_kwargs``.
    2. `reply` returns a :class:`~fsm_rollout.environment.users.Reply`, whatever the model has said; its content is text.
    3. It ends: within ``most_replies`` replies one is ``done``, and each comes within ``patience`` seconds.
    4. It reads only: messages, trajectory and the prompt's other fields stay as they are.
    5. The same conversation with the same ``rng`` gets the same replies (``deterministic``), also beside others, and
       however often it was held before.
    6. What it says depends on the conversation: one that is built anew in the middle, as for a resumed trajectory, goes
       on as the old one would have (``resumable``).
    7. Cancellation passes, at every await (where `reply` is async).
    8. The event loop is never blocked (where `reply` is async), and no task outlives a reply.
    9. `close`, if there is one, works after any number of replies, and after none.

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
    name = called(interaction.use if isinstance(interaction, Spec) else interaction)
    with importable(interaction.use if isinstance(interaction, Spec) else interaction) as path:
        given = interaction.kwargs if isinstance(interaction, Spec) else kwargs or {}
        checker = _Checker(Spec(use=path, kwargs=given), name, interaction_kwargs or {}, extra or {}, patience)
        checker.build()
        in_thread = not is_async(cast(Any, load_object(path)).reply)
        ran = search(_scripts, checker.replies, examples)
        checker.ends(Script(("Yes.",)), most_replies)
        if deterministic:
            ran += search(_scripts, checker.same, examples)
        if deterministic and resumable:
            ran += search(_scripts, checker.resumed, examples)
        if not in_thread:
            ran += search(_scripts, checker.cancelled, max(1, examples // 5))
    promises = ["built", "replies", "ends", "reads only", "tasks", "close"]
    promises += [] if in_thread else ["cancellation", "event loop"]
    promises += ["same rng"] if deterministic else []
    return Checked((*promises, *(["resumed"] if deterministic and resumable else [])), ran)


@dataclass(slots=True)
class _World:
    """One conversation, as the trajectory that holds it."""

    script: Script
    extra: Mapping[str, Any]
    events: list[Any] = field(default_factory=list)
    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "What is 2 + 2?"}])
    asked: int = 0

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
                at=0.0, trigger=Trigger.GENERATED, source="GENERATING", dest="INTERACTING", spent={"user_turns": 1}
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
        """Answer for any model, after a while; what is said depends on how often models have been asked."""
        check_written(messages)
        number, self.asked = self.asked, self.asked + 1
        await asyncio.sleep(0.5)
        return self.script.answers[number % len(self.script.answers)]


class _Checker:
    def __init__(
        self, spec: Spec, name: str, given: Mapping[str, Any], extra: Mapping[str, Any], patience: float
    ) -> None:
        self.spec, self.name, self.given, self.extra, self.patience = spec, name, given, extra, patience
        self.first: dict[Script, list[Reply]] = {}
        """What was said in each conversation when it was held for the first time."""

    def build(self) -> BoundInteraction:
        """Make one for a trajectory."""
        try:
            return build_interaction(self.spec, self.given)
        except ToolError as error:
            raise ConformanceError(1, f"{self.name} cannot be built: {error}") from error

    def run(self, work: Any) -> Any:
        """Run in virtual time."""
        return in_virtual_time(
            work,
            blocking=(8, self.name),
            endless=(3, f"{self.name}.reply never ends"),
            leaky=(8, f"tasks that {self.name} started outlived it"),
        )

    async def reply(self, made: BoundInteraction, world: _World, turn: int) -> Reply:
        """Get one reply and look at it."""
        conversation = world.enter(turn)
        before = copy.deepcopy((conversation.messages, conversation.trajectory, conversation.extra))
        stepped = Stepped(made.reply(conversation))
        said = world.messages[-1]["content"]
        try:
            async with asyncio.timeout(self.patience):
                reply = await stepped
        except TimeoutError:
            raise ConformanceError(
                3, f"{self.name}.reply to {said!r} did not come within {self.patience:g} s; {HOW_TIME_PASSES}"
            ) from None
        except BlockedLoop:
            raise
        except Exception as error:
            raise ConformanceError(
                2, f"{self.name}.reply to {said!r} (reply {turn + 1}) raised {type(error).__name__}: {error}"
            ) from error
        if reply.content is not None and not isinstance(reply.content, str):
            raise ConformanceError(2, f"{self.name}.reply to {said!r} has the content {reply.content!r}, no text")
        busy(8, self.name, stepped)
        for what, one, other in zip(
            ("messages", "trajectory", "extra"),
            before,
            (conversation.messages, conversation.trajectory, conversation.extra),
            strict=True,
        ):
            if one != other:
                raise ConformanceError(4, f"{self.name}.reply to {said!r} changed the conversation's {what}")
        world.take(reply)
        return reply

    async def close(self, made: BoundInteraction) -> None:
        try:
            async with asyncio.timeout(self.patience):
                await made.close()
        except Exception as error:
            raise ConformanceError(9, f"{self.name}.close raised {type(error).__name__}: {error}") from error

    async def talk(self, script: Script, rebuilt_at: int | None = None, most: int | None = None) -> list[Reply]:
        """Hold one conversation; ``rebuilt_at`` is the turn before which the interaction is made anew."""
        world, made, replies = _World(script, self.extra), self.build(), []
        for turn in range(len(script.turns) if most is None else most):
            if turn == rebuilt_at:
                await self.close(made)
                made = self.build()
            replies.append(await self.reply(made, world, turn))
            if replies[-1].done:
                break
        await self.close(made)
        return replies

    def replies(self, script: Script) -> None:
        """Hold a conversation, and close one that never began."""

        async def main() -> None:
            await self.close(self.build())
            self.first.setdefault(script, await self.talk(script))

        self.run(main())

    def ends(self, script: Script, most: int) -> None:
        """Go on until it is done."""
        replies = self.run(self.talk(script, most=most))
        if not replies or not replies[-1].done:
            raise ConformanceError(3, f"{self.name} was not done after {most} replies, the last: {replies[-1:]}")

    def same(self, script: Script) -> None:
        """Hold a conversation twice, and a third time beside another one."""
        other = Script(("Something else.", *script.turns), ("No.",), script.seed + 1)

        async def later() -> list[Reply]:
            await asyncio.sleep(LATER_SECONDS)
            return await self.talk(script)

        async def beside() -> list[Reply]:
            return (await asyncio.gather(self.talk(script), self.talk(other)))[0]

        latest = self.run(self.talk(script))
        first = self.first.setdefault(script, latest)
        again = ("the second time", latest), ("the second time", self.run(later()))
        for when, second in (*again, ("beside another", self.run(beside()))):
            if first != second:
                raise ConformanceError(
                    5, f"{self.name} answered {script} with {first}, and {when} with {second}; "
                    "take randomness from conversation.rng, read no clock, and keep nothing on the class"
                )  # fmt: skip

    def resumed(self, script: Script) -> None:
        """Build it anew before each turn but the first."""
        whole = self.run(self.talk(script))
        for turn in range(1, len(whole)):
            rest = self.run(self.talk(script, rebuilt_at=turn))
            if rest != whole:
                raise ConformanceError(
                    6, f"{self.name} answered {script.turns} with {whole}, but built anew before reply {turn + 1} "
                    f"with {rest}; count by conversation.replies, not on the instance"
                )  # fmt: skip

    def cancelled(self, script: Script) -> None:
        """Cancel the first reply, at each of its awaits in turn."""
        for number in range(1, MOST_WAITS):

            async def one(number: int = number) -> Stepped[Reply] | None:
                made = self.build()
                try:
                    return await cancelled_at(number, made.reply(_World(script, self.extra).enter(0)), STOP_SECONDS)
                except TimeoutError:
                    return None
                finally:
                    with suppress(Exception):
                        await made.close()

            stepped = self.run(one())
            if stepped is None:
                raise ConformanceError(
                    7, f"{self.name}.reply, cancelled at its await number {number}, did not stop in {STOP_SECONDS:g} s"
                )
            if stepped.cancelled_at is None:
                return
            if not stepped.heard:
                raise ConformanceError(
                    7, f"{self.name}.reply, cancelled at its await number {number}, swallowed it; let it pass"
                )
