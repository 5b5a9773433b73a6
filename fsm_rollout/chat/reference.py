"""What a chat template writes, from full renders of the whole conversation: the reference of all faster ways.

Invariant: an answer depends on what is asked alone; nothing is remembered, so any thread may ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import index
from typing import NamedTuple

from fsm_rollout.chat.derive import Deriver, Glue, Step
from fsm_rollout.chat.markers import Encoded, Injection, Part
from fsm_rollout.chat.messages import Dialect, Messages, check_turns, conform, pictures_of
from fsm_rollout.chat.pictures import PictureReader
from fsm_rollout.chat.render import Tools, shown_tools
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import media_of

AUTHORED = frozenset({"system", "developer", "assistant"})  # roles whose text in a prompt is not the environment's
FINISH_REASONS = frozenset(FinishReason)
# Refusals that another form of a tool call may avoid.
RETRIED = frozenset({"template-raised", "turn-dropped", "no-close-token"})


class Opening(NamedTuple):
    """Asks for the ids of a conversation that the model continues."""

    messages: Messages
    tools: Tools | None
    now: datetime | None = None


class FollowUp(NamedTuple):
    """Asks for the ids between the last sampled token and the next generation: the *glue*.

    ``history`` ends in the assistant's turn whose tokens, or the last one of them, are ``sampled_ids``; ``new`` are the
    messages that follow it.
    """

    history: Messages
    new: Messages
    tools: Tools | None
    sampled_ids: Sequence[int]
    finish_reason: str
    now: datetime | None = None


class PromptParts(NamedTuple):
    """A prompt as the template writes it: its messages as the template saw them, and its text in parts."""

    messages: list[Message]
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Reference:
    """Answers by full renders. ``dialect`` is the form of tool calls that the template prefers."""

    deriver: Deriver
    dialect: Dialect
    injection: Injection
    stop_ids: frozenset[int]
    now: datetime
    reader: PictureReader | None = None
    """Reads pictures; None: the model sees none."""
    blind: str = "this model reads text only"
    """Why it sees none."""

    def encode(self, asked: Opening | FollowUp) -> Encoded:
        """Answer; ChatTemplateError: see the rules in :mod:`fsm_rollout.chat`."""
        if isinstance(asked, Opening):
            encoded = self.deriver.encoder.encode_parts(self.prompt(asked).parts, self.injection)
        else:
            encoded = self.glue(asked)[1].encode(self.deriver.encoder, self.injection)
        return self.with_pictures(encoded, asked)

    def with_pictures(self, encoded: Encoded, asked: Opening | FollowUp) -> Encoded:
        """Return the answer with the pictures' own ids instead of their placeholders."""
        if self.reader is not None:
            return self.reader.placed(encoded, pictures_of(asked.messages if isinstance(asked, Opening) else asked.new))
        messages = asked.messages if isinstance(asked, Opening) else [*asked.history, *asked.new]
        for place, message in enumerate(messages):
            if media_of(message):
                raise ChatTemplateError("multimodal-content", f"message {place} holds a picture, and {self.blind}")
        return encoded

    def prompt(self, asked: Opening) -> PromptParts:
        """Return a prompt.

        Text of user and tool messages is the environment's; that of system and assistant messages is the
        author's and the model's, and may hold control tokens.
        """
        tools, now = shown_tools(asked.tools), asked.now or self.now
        messages = conform(asked.messages, self.dialect)
        if not messages:
            raise ChatTemplateError("malformed-message", "a prompt needs at least one message")
        text = self.deriver.renderer.render(messages, tools, now)
        return PromptParts(messages, self.deriver.prompt_parts(messages, AUTHORED, tools, now, text))

    def glue(self, asked: FollowUp) -> tuple[Step, Glue]:
        """Derive glue in the template's own dialect; if there is no answer in that, in the other forms of a call."""
        tools, sampled = shown_tools(asked.tools), self.stop_of(asked)
        check_turns(asked.history, asked.new)
        last = len(asked.history) - 1
        preferred = self.dialect
        as_text = (preferred.arguments_as_text, not preferred.arguments_as_text)
        as_none = (preferred.empty_as_none, not preferred.empty_as_none)
        failures: list[ChatTemplateError] = []
        for dialect in (Dialect(text, none) for none in as_none for text in as_text):
            view = conform([*asked.history, *asked.new], dialect)
            self._refuse_marked_names(view[last:])
            step = Step(view[:last], view[last], view[last + 1 :], tools, sampled, asked.now or self.now)
            try:
                return step, self.deriver.derive(step)
            except ChatTemplateError as error:
                failures.append(error)
                if error.rule not in RETRIED or not any(message.get("tool_calls") for message in view):
                    break
        raise failures[0]

    def stop_of(self, asked: FollowUp) -> int | None:
        """Return the stop token that the turn ended in, or None if it was cut."""
        sampled_ids, finish_reason = asked.sampled_ids, asked.finish_reason
        if not isinstance(finish_reason, str) or finish_reason not in FINISH_REASONS:
            raise ChatTemplateError(
                "unknown-option", f"finish_reason must be stop, length or abort, got {finish_reason!r}"
            )
        if finish_reason != FinishReason.STOP:
            return None
        try:
            last = index(sampled_ids[-1]) if len(sampled_ids) else None  # numpy's and torch's integers too
        except (TypeError, ValueError, LookupError):
            last = None
        if last is None or (last not in self.stop_ids and last not in self.deriver.encoder.ids):
            raise ChatTemplateError(
                "not-a-stop-token",
                f"finish_reason is 'stop', but the last sampled id is {last}, not a stop token; "
                "keep the stop token in sampled_ids, or name it in close_tokens",
            )
        return last

    def _refuse_marked_names(self, messages: Sequence[Message]) -> None:
        """Names and ids of calls are written by templates as they are: one with a control token is refused."""
        if self.injection == "allow":
            return
        for message in messages:
            calls = message.get("tool_calls", ())
            words = [message.get("name"), message.get("tool_call_id"), message["role"]]
            words += [word for call in calls for word in (call["id"], call["function"]["name"])]
            find = self.deriver.encoder.find
            if any(isinstance(word, str) and not word.isalnum() and find(word) for word in words):
                raise ChatTemplateError("injected-marker", f"a name or id holds a control token: {words!r}")
