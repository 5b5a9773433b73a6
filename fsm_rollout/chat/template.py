"""ChatTemplate: prompts and glue as token ids, through a cache held equal to the reference.

Invariant: ``glue`` and ``prompt`` give what ``glue_reference`` and ``prompt_reference`` give, refusals included;
the cache only saves time. Some of its answers are audited, and what an audit finds wrong is named by its entry.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import index
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict, Unpack, get_args

from fsm_rollout.chat.derive import Deriver, Glue, Step
from fsm_rollout.chat.glue_cache import GlueCache
from fsm_rollout.chat.markers import CacheEntry, Encoded, Injection, encoder_for
from fsm_rollout.chat.messages import Dialect, Messages, check_turns, conform, roles_of
from fsm_rollout.chat.render import Renderer, TemplateSource, Tools, shown_tools
from fsm_rollout.chat.turn_ends import CloseFinder, generation_config_stops, learn_dialect
from fsm_rollout.errors import ChatTemplateError, GlueMismatchError
from fsm_rollout.trajectory.content import text_of
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["keep", "split"]

log = logging.getLogger(__name__)

AUTHORED = frozenset({"system", "developer", "assistant"})  # roles whose text in a prompt is not the environment's
AUDIT_FIRST = 2
AUDIT_EVERY = 64  # which uses of a cache entry are checked against a full render: the first ones, then one in so many
# Streams longer than this are checked more rarely, in proportion: a full render grows with what it renders.
AUDIT_TOKENS = 1024
FINISH_REASONS = frozenset(FinishReason)
# Refusals that another form of a tool call may avoid.
RETRIED = frozenset({"template-raised", "turn-dropped", "no-close-token"})


class SampledTurn(TypedDict):
    """How the last turn of a history was sampled; see :meth:`ChatTemplate.glue`."""

    sampled_ids: Sequence[int]
    finish_reason: str
    now: NotRequired[datetime | None]


class ChatTemplate:
    """A model's chat template as token ids; cheap to share, keeps no state of any trajectory.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: used instead of the tokenizer's own: text, texts by name, or the name of one of its own.
        template_kwargs: further variables of the template, e.g. ``enable_thinking``.
        close_tokens: tokens (text or ids) that end an assistant turn, beside those found out.
        injection: what to do with control tokens in message text: ``guard`` (encode them as plain text), ``allow``
            or ``raise``.
        history: ``keep`` or ``split``, see :meth:`must_split`.
        now: what the template's clock says unless a call says otherwise; by default the time of construction.

    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        chat_template: TemplateSource | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        close_tokens: Sequence[str | int] = (),
        injection: Injection = "guard",
        history: History = "keep",
        now: datetime | None = None,
    ) -> None:
        if injection not in get_args(Injection):
            raise ChatTemplateError("unknown-option", f"injection must be guard, allow or raise, got {injection!r}")
        if history not in get_args(History):
            raise ChatTemplateError("unknown-option", f"history must be keep or split, got {history!r}")
        self.tokenizer = tokenizer
        self.injection: Injection = injection
        self.history: History = history
        self.now = now or datetime.now()
        self._encoder = encoder_for(tokenizer)
        self._renderer = Renderer(tokenizer, chat_template, template_kwargs)
        configured_stops = self._known_stops(close_tokens)
        self._dialect = learn_dialect(self._renderer, self.now)
        closes = CloseFinder(self._renderer, self._encoder, self._dialect, configured_stops, self.now).closes()
        self._deriver = Deriver(self._renderer, self._encoder, configured_stops, closes)
        self._cache = GlueCache(self._deriver, self._dialect, injection)
        self.audit_failures: deque[str] = deque(maxlen=16)
        self.close_ids: frozenset[int] = closes.ids
        self.stop_ids: frozenset[int] = configured_stops | closes.ids

    def _known_stops(self, close_tokens: Sequence[str | int]) -> frozenset[int]:
        """Return the ids of the tokenizer's eos, of a generation config lying beside it, and of the caller."""
        stop_ids = {self.tokenizer.eos_token_id, *generation_config_stops(self.tokenizer)} - {None}
        for token in close_tokens:
            marker = self._encoder.by_text.get(token) if isinstance(token, str) else None
            id_ = marker.id if marker else token
            if not isinstance(id_, int) or id_ not in self._encoder.by_id:
                raise ChatTemplateError("unknown-close-token", f"{token!r} is not a control token of this tokenizer")
            stop_ids.add(id_)
        return frozenset(stop_ids)

    @property
    def source(self) -> str:
        """The template's own text, as used where there are tools."""
        return self._renderer.source

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        return self._encoder.decode(ids)

    # --- prompts

    def prompt(self, messages: Messages, tools: Tools | None, *, now: datetime | None = None) -> list[int]:
        """Return the ids of a conversation that the model continues.

        Raises:
            ChatTemplateError: see the rules in :mod:`fsm_rollout.chat`.

        """
        return self.prompt_detailed(messages, tools, now=now).ids

    def prompt_detailed(self, messages: Messages, tools: Tools | None, *, now: datetime | None = None) -> Encoded:
        """Return what :meth:`prompt` does, with the guarded control tokens: how many, and where."""
        now, tools = now or self.now, shown_tools(tools)
        key = self._cache.prompt_key(messages, tools, now)
        if key and (learned := self._cache.templates.get(key)):
            return learned.encode([text_of(messages[-1])])
        encoded = self.prompt_reference(messages, tools, now=now)
        if key:
            self._cache.learn_prompt(key, conform(messages, self._dialect), tools, now, encoded)
        return encoded

    def prompt_reference(self, messages: Messages, tools: Tools | None, *, now: datetime | None = None) -> Encoded:
        """Return the prompt from one full render, without any cache.

        Text of user and tool messages is the environment's; that of system and assistant messages is the
        author's and the model's, and may hold control tokens.
        """
        tools, now = shown_tools(tools), now or self.now
        view = conform(messages, self._dialect)
        if not view:
            raise ChatTemplateError("malformed-message", "a prompt needs at least one message")
        text = self._renderer.render(view, tools, now)
        foreign = [number for number, message in enumerate(view) if message["role"] not in AUTHORED]
        parts = self._deriver.prompt_parts(view, foreign, tools, now, text)
        return self._encoder.encode_parts(parts, self.injection)

    # --- glue

    def glue(
        self,
        history: Messages,
        new_messages: Messages,
        tools: Tools | None,
        *,
        sampled_ids: Sequence[int],
        finish_reason: str,
        now: datetime | None = None,
    ) -> list[int]:
        """Return the ids between the last sampled token and the next generation.

        Args:
            history: OpenAI-style messages; the last is the assistant turn whose tokens are ``sampled_ids``.
            new_messages: what follows it: tool and user messages.
            tools: the OpenAI schemas given to :meth:`prompt`; they must not be changed in between.
            sampled_ids: the turn's tokens, ending in the stop token unless it was cut.
            finish_reason: ``stop``; ``length`` or ``abort`` for a turn that was cut.
            now: the template's clock, if not the instance's.

        Raises:
            ChatTemplateError: see the rules in :mod:`fsm_rollout.chat`.

        """
        turn = SampledTurn(sampled_ids=sampled_ids, finish_reason=finish_reason, now=now)
        return self.glue_detailed(history, new_messages, tools, **turn).ids

    def glue_detailed(
        self, history: Messages, new_messages: Messages, tools: Tools | None, **turn: Unpack[SampledTurn]
    ) -> Encoded:
        """Return what :meth:`glue` does, with the guarded control tokens, and the cache entry that was used."""
        sampled, tools = self._stop_of(turn), shown_tools(tools)
        shape = self._cache.shape(history, new_messages, tools, sampled)
        if shape and (learned := self._cache.templates.get(shape.key)):
            return learned.encode(shape.texts)
        step, glue = self._derive(history, new_messages, tools, sampled, turn.get("now"))
        encoded = glue.encode(self._encoder, self.injection)
        if shape:
            self._cache.learn(shape, step, glue, encoded)
        return encoded

    def glue_reference(
        self, history: Messages, new_messages: Messages, tools: Tools | None, **turn: Unpack[SampledTurn]
    ) -> Encoded:
        """Return the glue from full renders of the whole history, without any cache."""
        sampled, tools = self._stop_of(turn), shown_tools(tools)
        _, glue = self._derive(history, new_messages, tools, sampled, turn.get("now"))
        return glue.encode(self._encoder, self.injection)

    def _derive(
        self, history: Messages, new_messages: Messages, tools: Tools | None, sampled: int | None, now: datetime | None
    ) -> tuple[Step, Glue]:
        """Derive in the template's own dialect; if there is no answer in that, in the other forms of a call."""
        check_turns(history, new_messages)
        last = len(history) - 1
        preferred = self._dialect
        as_text = (preferred.arguments_as_text, not preferred.arguments_as_text)
        as_none = (preferred.empty_as_none, not preferred.empty_as_none)
        failures: list[ChatTemplateError] = []
        for dialect in (Dialect(text, none) for none in as_none for text in as_text):
            view = conform([*history, *new_messages], dialect)
            self._refuse_marked_names(view[last:])
            step = Step(view[:last], view[last], view[last + 1 :], tools, sampled, now or self.now)
            try:
                return step, self._deriver.derive(step)
            except ChatTemplateError as error:
                failures.append(error)
                if error.rule not in RETRIED or not any(message.get("tool_calls") for message in view):
                    break
        raise failures[0]

    def _stop_of(self, turn: SampledTurn) -> int | None:
        """Return the stop token a turn ended in, or None if it was cut."""
        sampled_ids, finish_reason = turn["sampled_ids"], turn["finish_reason"]
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
        if last is None or (last not in self.stop_ids and last not in self._encoder.ids):
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
            if any(isinstance(word, str) and not word.isalnum() and self._encoder.find(word) for word in words):
                raise ChatTemplateError("injected-marker", f"a name or id holds a control token: {words!r}")

    # --- policy, audit

    def must_split(self, history: Messages, new_messages: Messages, tools: Tools | None) -> bool:
        """Return whether the caller must close the stream and open the next with ``prompt(history + new)``.

        With ``history="split"`` that is so wherever a user speaks: templates drop reasoning and rewrite old
        turns there. The closed stream keeps every sampled token with mask 1; in the new one everything,
        old turns included, is prompt (mask 0), so each sampled token is trained exactly once.
        """
        return self.history == "split" and "user" in roles_of(new_messages)

    def audit_due(self, entry: CacheEntry) -> bool:
        """Say whether this use of a cache entry shall be audited: the first ones are, then one in so many."""
        entry.uses += 1
        return entry.uses <= AUDIT_FIRST or entry.uses % AUDIT_EVERY == 0

    def audit_fits(self, entry: CacheEntry, length: int) -> bool:
        """Say whether an audit that is due shall be made in a stream of so many tokens, or is left out to save time."""
        entry.saved += AUDIT_TOKENS
        if entry.uses > AUDIT_FIRST and entry.saved < length:
            return False
        entry.saved = 0
        return True

    def audit(
        self,
        history: Messages,
        new_messages: Messages,
        tools: Tools | None,
        encoded: Encoded,
        **turn: Unpack[SampledTurn],
    ) -> GlueMismatchError | None:
        """Compare what :meth:`glue_detailed` gave for these arguments with the reference; return how they differ.

        It takes full renders, milliseconds that no turn should wait for. After a difference this template is served by
        the reference alone; the caller has to end every trajectory that used ``encoded.entry``, and those only.
        """
        try:
            reference = self.glue_reference(history, new_messages, tools, **turn).ids
            if encoded.ids == reference:
                return None
            expected = f"gives {self.decode(reference)!r}"
        except ChatTemplateError as error:
            expected = f"is refused: {error}"
        mismatch = GlueMismatchError(
            f"the cache gave {self.decode(encoded.ids)!r}, the full render {expected}", encoded.entry
        )
        self._cache.distrust()
        self.audit_failures.append(str(mismatch))
        log.warning("chat template audit failed, its cache is off from here: %s", mismatch)
        return mismatch
