"""Who answers the model in INTERACTING: a simulated user, or an environment.

Invariant: an interaction reads a conversation and replies; it changes nothing. Its reply enters the stream as the
environment's text. What it asks of models on the way enters no stream at all. One is made per trajectory.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from pydantic import ValidationError

from fsm_rollout.agent.graph import InteractionSpec
from fsm_rollout.environment.answer_matching import gives_answer
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.names.objects import load_object
from fsm_rollout.tools.base import fresh
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.tools.tool_messages import Unshowable, clean, content
from fsm_rollout.trajectory.events import Message, as_score
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import media_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

A_PICTURE = "[a picture]\n"  # what stands for one where a user is played by a model

# Asks a model on a named engine, in its own template and tokenizer: engine, messages, sampling → its text.
Ask = Callable[[str, Sequence[Message], Sampling | None], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What an interaction says.

    Raises:
        TypeError: the content is no text, or the score no number.
        ValueError: it says nothing and does not end the conversation either, or no float32 holds the score.
    """

    content: Any
    """Text; or a picture, or texts and pictures, as a tool may return them; ``None`` only with ``done``."""
    score: float | None = None
    """Of the assistant turn that was just judged."""
    done: bool = False
    """Whether the conversation is over."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str | None):
            try:
                _, shown = content(self.content)
            except Unshowable as error:
                raise TypeError(f"a reply's content: {error}") from error
            if not shown:
                told = reprlib.repr(self.content)
                raise TypeError(f"a reply's content must be a string, pictures or None, got {told}")
            object.__setattr__(self, "content", shown)
        if self.content is None and not self.done:
            raise ValueError("a reply without content must be `done`: there is nothing for the model to answer")
        as_score(self.score, "a reply's score")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an interaction may read, and how it asks a model."""

    messages: Sequence[Message]
    """The context's history so far, in OpenAI's form."""
    trajectory: Trajectory
    """To be read only."""
    extra: Mapping[str, object]
    """The prompt's other fields; to be read only."""
    rng: Random
    """Seeded by the trajectory and the visit."""
    ask: Ask
    replies: int
    """How often the interaction has replied before, in all states that share it; a resumed trajectory knows it too."""

    @property
    def text(self) -> str:
        """The latest assistant turn's text."""
        texts = (text_of(m) for m in reversed(self.messages) if m["role"] == "assistant")
        return next(texts, "")


class Interaction(Protocol):
    """A class with `reply`, sync (then it runs in a thread) or async; optionally `close`, the same way.

    One is made per trajectory, from the agent's ``interaction.kwargs`` overlaid with the prompt's
    ``interaction_kwargs``. A trajectory that is resumed in another process has a new one. It goes on where the class
    says ``resumable = True``, because what it replies follows from the conversation; or where it has ``snapshot(self)
    -> bytes``, which is asked after each reply and kept in the journal, and ``restore(self, data: bytes)``. Otherwise
    the trajectory begins anew.
    """

    def reply(self, conversation: Conversation) -> object:
        """Answer the latest assistant turn: a :class:`Reply`."""


@dataclass(frozen=True, slots=True)
class BoundInteraction:
    """An interaction made for one trajectory, behind one async face."""

    name: str
    interaction: Interaction

    async def reply(self, conversation: Conversation) -> Reply:
        """Let it answer.

        Raises:
            TypeError: it returned something else than a Reply.
            Exception: whatever it raises itself.
        """
        reply = await invoke(partial(self.interaction.reply, conversation), {})
        if not isinstance(reply, Reply):
            raise TypeError(f"{self.name}.reply must return a Reply, got {type(reply).__name__}")
        text = reply.content
        return Reply(clean(text), reply.score, reply.done) if isinstance(text, str) else reply

    @property
    def resumable(self) -> bool:
        """Whether a new one goes on with the conversation that another has begun."""
        return bool(getattr(self.interaction, "resumable", False))

    @property
    def snapshots(self) -> bool:
        """Whether what it knows can be kept, and restored."""
        return all(callable(getattr(self.interaction, name, None)) for name in ("snapshot", "restore"))

    async def snapshot(self) -> bytes:
        """Return what it knows after its latest reply; raises what it raises, TypeError for what is not bytes."""
        data = await invoke(self.interaction.snapshot, {})  # type: ignore[attr-defined]  # `snapshots` says so
        if not isinstance(data, bytes):
            raise TypeError(f"{self.name}.snapshot must return bytes, got {type(data).__name__}")
        return data

    async def restore(self, data: bytes) -> None:
        """Give it what an earlier one knew; raises what it raises."""
        await invoke(partial(self.interaction.restore, data), {})  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close it, if it has anything to close; raises what it raises."""
        if (close := getattr(self.interaction, "close", None)) is not None:
            await invoke(close, {})


def build_interaction(spec: InteractionSpec, kwargs: object = None) -> BoundInteraction:
    """Make a trajectory's interaction; ``kwargs``: its ``interaction_kwargs``. ToolError says whose keys are wrong."""
    where, from_prompt = f"interaction '{spec.use}'", kwargs or {}
    if not isinstance(from_prompt, Mapping):
        raise ToolError(f"the prompt's interaction_kwargs must be a mapping, got {type(from_prompt).__name__}")
    try:
        cls = load_object(spec.use)
    except ConfigError as error:
        raise ToolError(f"{where}: {error}") from error
    if not callable(cls) or not callable(getattr(cls, "reply", None)):
        raise ToolError(f"{where}: it is not a class with a method `reply`")
    merged = fresh({**spec.kwargs, **from_prompt})
    try:
        return BoundInteraction(spec.use, cls(**merged))
    except Exception as raised:  # a user's constructor may find anything wrong with a prompt's values
        signature = inspect.signature(cls)  # only now: reading it takes longer than most constructors
        try:
            signature.bind(**merged)
        except TypeError as error:
            origins = {
                key: "interaction_kwargs of the prompt" if key in from_prompt else "its kwargs" for key in merged
            }
            got = ", ".join(f"{key} ({origin})" for key, origin in origins.items()) or "nothing"
            raise ToolError(f"{where}: {error}; it takes {signature}, got {got}") from error
        source = f" (the prompt's interaction_kwargs gave {', '.join(from_prompt)})" if from_prompt else ""
        raise ToolError(f"{where}: {type(raised).__name__}: {raised}{source}") from raised


class ScriptedUser:
    """Says its turns in order, then ends the conversation.

    With ``answers`` (one for each turn) and an ``answer`` in the prompt it judges every assistant turn that it
    answers, 1.0 or 0.0: the first by the prompt's ``answer``, the one after ``turns[i]`` by ``answers[i]``.
    """

    resumable = True

    def __init__(self, turns: Sequence[str] = (), answers: Sequence[object] | None = None) -> None:
        if isinstance(turns, str) or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"`turns` must be a list of strings, got {turns!r}")
        if answers is not None and (isinstance(answers, str) or len(answers) != len(turns)):
            raise ValueError(
                f"`answers` must be a list with one answer for each of the {len(turns)} turns, got {answers!r}"
            )
        self._turns, self._answers = turns, answers

    async def reply(self, conversation: Conversation) -> Reply:
        """Judge the latest turn and say the next line, if there is one."""
        number, score = conversation.replies, None
        if self._answers is not None and "answer" in conversation.extra and number <= len(self._answers):
            expected = (conversation.extra["answer"], *self._answers)[number]
            score = float(gives_answer(conversation.text, expected))
        content = self._turns[number] if number < len(self._turns) else None
        return Reply(content, score, done=content is None)


class ModelUser:
    """A model plays the user: it reads the conversation from the other side, on an engine of its own.

    Args:
        engine: a name of the run's engines.
        max_turns: after so many replies the conversation ends.
        system: its instructions: who it is and what it wants.
        opening: the first message it sees, as if the assistant had spoken first; many chat templates ask for one.
        stop: the conversation ends when this stands in its reply; the rest of that reply is dropped. An
            empty reply ends it too.
        sampling: how its turns are sampled, as in a state's ``sampling``.
    """

    resumable = True

    def __init__(
        self,
        engine: str = "user",
        *,
        max_turns: int,
        system: str | None = None,
        opening: str = "Hello! What can I do for you?",
        stop: str = "<done>",
        sampling: Mapping[str, object] | None = None,
    ) -> None:
        if not stop:
            raise ValueError("`stop` must not be empty: every reply would hold it")
        try:
            self._sampling = Sampling.model_validate(sampling or {})
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise ValueError(f"`sampling` is wrong: {message}; got {sampling!r}") from None
        self._engine, self._max_turns, self._stop = engine, max_turns, stop
        self._system, self._opening = system, opening

    async def reply(self, conversation: Conversation) -> Reply:
        """Ask the model for the user's next message."""
        if conversation.replies >= self._max_turns:
            return Reply(None, done=True)
        text = (await conversation.ask(self._engine, self.seen(conversation.messages), self._sampling)).strip()
        return Reply(None, done=True) if not text or self._stop in text else Reply(text)

    def seen(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation from the user's side: roles swapped, tools and system messages out of sight.

        Where a message shows a picture, it is said that there is one: few templates show any in an assistant's turn.

        Roles alternate, beginning with ``user`` (after the system message), as strict chat templates demand.
        """
        swapped = {"user": "assistant", "assistant": "user"}
        turns: list[Message] = []
        for message in messages:
            role = swapped.get(message["role"])
            content = "".join([*(A_PICTURE for _ in media_of(message)), text_of(message)]).strip()
            if role is None or not content:
                continue
            if not turns and role == "assistant":
                turns.append({"role": "user", "content": self._opening})
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += f"\n\n{content}"
            else:
                turns.append({"role": role, "content": content})
        return [{"role": "system", "content": self._system}, *turns] if self._system is not None else turns
