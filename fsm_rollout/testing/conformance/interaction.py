"""Whether an interaction (a simulated user, an environment) can be part of a conversation.

Invariant: the conversation is a real trajectory, a fold of events that grows by what the interaction says and by drawn
assistant turns; the models it asks are drawn, too. Everything runs in virtual time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from fsm_rollout.agent.graph import InteractionSpec
from fsm_rollout.chat.messages import check_written
from fsm_rollout.environment.users import BoundInteraction, Conversation, Reply, build_interaction
from fsm_rollout.errors import ToolError
from fsm_rollout.names.objects import load_object
from fsm_rollout.testing.conformance.runner import Checked, ConformanceError, Subject, Suite, demand, named
from fsm_rollout.testing.simulation.blocked_loop import CallRefused
from fsm_rollout.tools.bounded_call import is_async
from fsm_rollout.trajectory.enums import LimitName, Trigger
from fsm_rollout.trajectory.events import Message, Prompted, Transitioned
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trajectory import Trajectory

LATER_SECONDS = 1024.0  # how much later the same conversation is held again: it must not depend on the clock


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


def check_interaction(
    interaction: type | str | InteractionSpec,
    *,
    kwargs: Mapping[str, object] | None = None,
    interaction_kwargs: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    most_replies: int = 64,
    deterministic: bool = True,
    resumable: bool | None = None,
    patience: float = 60.0,
    examples: int = 30,
) -> Checked:
    """Hold an interaction to its promises, in generated conversations.

    1. built: It can be built from its `kwargs` and the prompt's `interaction_kwargs`.
    2. replies: `reply` returns a `Reply` whose content is text, whatever the model has said.
    3. ends: Within `most_replies` replies one is `done`, and each comes within `patience` seconds.
    4. reads only: Messages, trajectory and the prompt's other fields stay as they are.
    5. same rng: The same conversation with the same `rng` gets the same replies: alone, beside, later.
    6. resumed: Built anew in the middle, as for a resumed trajectory, it goes on as before.
    7. cancellation: Cancellation passes, at every await (where `reply` is async).
    8. event loop: No task outlives a reply; where `reply` is async, the event loop is never blocked.
    9. close: `close`, if there is one, works after any number of replies, and after none.

    Example::

        check_interaction(my_users.Customer, interaction_kwargs={"goal": "a refund"}, extra={"answer": "42"})

    Args:
        interaction: the class, its ``module:Class``, or an agent's own (``graph.interaction``).
        kwargs: those of the agent's YAML.
        interaction_kwargs: a prompt's.
        extra: the prompt's other fields.
        most_replies: how long a conversation may be.
        deterministic: whether promise 5 is made.
        resumable: whether promise 6 is made; default: unless the class says ``resumable = False``.
        patience: virtual seconds that a reply may take.
        examples: how many conversations each promise is tried on.

    Raises:
        ConformanceError: a promise does not hold; with the shortest conversation that shows it.
    """
    code = interaction.use if isinstance(interaction, InteractionSpec) else interaction
    with SUITE.judging():
        path, name = named(code)
        spec = (
            interaction if isinstance(interaction, InteractionSpec) else InteractionSpec(use=path, kwargs=kwargs or {})
        )
        subject = _Interaction(spec, name, patience, examples, interaction_kwargs or {}, extra or {}, most_replies)
        resumable = bool(getattr(load_object(path), "resumable", True)) if resumable is None else resumable
        subject.unmade |= (set() if deterministic else {5, 6}) | (set() if resumable else {6})
        return SUITE.hold(subject)


SUITE = Suite[Callable[["_Interaction"], "int | None"]](check_interaction)


class _World:
    """One conversation, and the trajectory that holds it."""

    def __init__(self, script: Script, extra: Mapping[str, object]) -> None:
        self.script, self.questions = script, 0
        self.messages: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
        prompted = Prompted(
            at=0.0, trajectory_id="check/0", group_id="check", sample=0, agent="check", initial="GENERATING",
            messages=list(self.messages), extra=dict(extra), limits={}, seed=script.seed, date="2026-01-01T00:00:00",
        )  # fmt: skip
        self.trajectory = Trajectory.fold([prompted])

    def enter(self, turn: int) -> Conversation:
        """Let the model say its turn, and enter INTERACTING once more."""
        self.messages.append({"role": "assistant", "content": self.script.turns[turn % len(self.script.turns)]})
        self._go(Trigger.GENERATED, "GENERATING", "INTERACTING", {LimitName.USER_TURNS: 1})
        messages, rng = copy.deepcopy(self.messages), Random(f"{self.script.seed}/{turn}")
        return Conversation(messages, self.trajectory, self.trajectory.extra, rng, self.ask, replies=turn)

    def take(self, reply: Reply) -> None:
        if reply.content is not None:
            self.messages.append({"role": "user", "content": reply.content})
        self._go(Trigger.REPLIED, "INTERACTING", "GENERATING", {})

    def _go(self, trigger: Trigger, source: str, dest: str, spent: dict[str, int]) -> None:
        self.trajectory.apply(Transitioned(at=0.0, trigger=trigger, source=source, dest=dest, spent=spent))

    async def ask(self, engine: str, messages: Sequence[Message], sampling: Sampling | None = None) -> str:
        """Answer for any model, after a while; the answer depends on how often models have been asked."""
        check_written(messages, sees=False)
        number, self.questions = self.questions, self.questions + 1
        await asyncio.sleep(0.5)
        return self.script.answers[number % len(self.script.answers)]


class _Interaction(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 8, 3, 8, 7

    def __init__(
        self, spec: InteractionSpec, name: str, patience: float, examples: int,
        interaction_kwargs: Mapping[str, object], extra: Mapping[str, object], most_replies: int,
    ) -> None:  # fmt: skip
        super().__init__(name, f"{name}.reply", patience, examples)
        self.spec, self.interaction_kwargs, self.extra = spec, interaction_kwargs, extra
        self.most_replies = most_replies
        # The replies in each conversation when it was held for the first time.
        self.first_replies: dict[Script, list[Reply]] = {}
        self.unmade = set() if is_async(self.build().interaction.reply) else {7}

    def build(self) -> BoundInteraction:
        """Make one for a trajectory."""
        try:
            return build_interaction(self.spec, self.interaction_kwargs)
        except ToolError as error:
            raise ConformanceError(1, f"{self.name} cannot be built: {error}") from error

    async def reply(self, interaction: BoundInteraction, world: _World, turn: int) -> Reply:
        """Get one reply and look at it."""
        conversation = world.enter(turn)
        before = copy.deepcopy((conversation.messages, conversation.trajectory, conversation.extra))
        to = f"{self.name}.reply to {text_of(world.messages[-1])!r}"
        try:
            reply = await self.in_time(interaction.reply(conversation), f"{to} did not come")
        except (ConformanceError, CallRefused):
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise ConformanceError(2, f"{to} (reply {turn + 1}) raised {raised}") from error
        is_text = reply.content is None or isinstance(reply.content, str)
        demand(is_text, 2, f"{to} has the content {reply.content!r}, no text")
        after = (conversation.messages, conversation.trajectory, conversation.extra)
        for what, old, new in zip(("messages", "trajectory", "extra"), before, after, strict=True):
            demand(old == new, 4, f"{to} changed the conversation's {what}")
        world.take(reply)
        return reply

    async def close(self, interaction: BoundInteraction) -> None:
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

    @SUITE.check(1, 2, 4, 8, 9)
    def converses(self) -> int:
        """Hold conversations, and close an interaction that never began."""

        def hold(script: Script) -> None:
            async def main() -> None:
                await self.close(self.build())
                self.first_replies.setdefault(script, await self.talk(script))

            self.run(main())

        return self.search(_scripts, hold)

    @SUITE.check(3)
    def ends(self) -> None:
        """Go on until it is done."""
        replies = self.run(self.talk(Script(("Yes.",)), most=self.most_replies))
        done = bool(replies) and replies[-1].done
        demand(done, 3, f"{self.name} was not done after {self.most_replies} replies, the last: {replies[-1:]}")

    @SUITE.check(5)
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
                answered = f"answered {script} with {first}, and {when} with {second}"
                advice = "take randomness from conversation.rng, read no clock, and keep nothing on the class"
                demand(first == second, 5, f"{self.name} {answered}; {advice}")

        return self.search(_scripts, hold)

    @SUITE.check(6)
    def resumes(self) -> int:
        """Build it anew before each turn but the first."""

        def hold(script: Script) -> None:
            whole = self.run(self.talk(script))
            for turn in range(1, len(whole)):
                replies = self.run(self.talk(script, rebuilt_at=turn))
                answered = (
                    f"answered {script.turns} with {whole}, but built anew before reply {turn + 1} with {replies}"
                )
                advice = "count by conversation.replies, not on the instance"
                demand(replies == whole, 6, f"{self.name} {answered}; {advice}")

        return self.search(_scripts, hold)

    @SUITE.check(7)
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

        return self.search(_scripts, hold, 5)
