"""ChatTemplate: prompts and glue as token ids, through a cache held equal to the reference.

Invariant: ``glue`` and ``prompt`` give what ``glue_reference`` and ``prompt_reference`` give, refusals included;
the cache is a matter of time only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from operator import index
from typing import TYPE_CHECKING, Any, Literal, get_args

from fsm_rollout.chat.cache import Cache
from fsm_rollout.chat.closing import generation_config_stops, learn_closes, learn_dialect
from fsm_rollout.chat.derivation import Deriver, Glue
from fsm_rollout.chat.learning import Case, Learner
from fsm_rollout.chat.markers import Encoded, Injection, Part, encoder_for
from fsm_rollout.chat.messages import Dialect, Message, check_turns, conform, roles_of
from fsm_rollout.chat.rendering import Renderer, TemplateSource, Tools, shown_tools
from fsm_rollout.errors import ChatTemplateError, GlueMismatchError
from fsm_rollout.trajectory.reasons import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["keep", "split"]

log = logging.getLogger(__name__)

AUTHORED = frozenset({"system", "developer", "assistant"})
"""Roles whose text in a prompt is not the environment's."""

AUDIT_FIRST = 2
AUDIT_EVERY = 64
"""Which uses of a cache entry are checked against a full render: the first ones, then one in so many."""

RETRIED = frozenset({"template-raised", "turn-dropped", "no-close-token"})
"""Refusals that another form of a tool call may avoid."""


class ChatTemplate:
    """A model's chat template as token ids; cheap to share, keeps no state of any trajectory.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: used instead of the tokenizer's own: text, texts by name, or the name of one of its own.
        template_kwargs: further variables of the template, e.g. ``enable_thinking``.
        close_tokens: tokens (text or ids) that end an assistant turn, beside those found out.
        injection: what to do with control tokens in message text, see :mod:`fsm_rollout.chat`.
        history: ``keep`` or ``split``, see :meth:`must_split`.
        now: what the template's clock says unless a call says otherwise; by default the time of construction.

    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        chat_template: TemplateSource | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
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
        self._known = self._known_stops(close_tokens)
        self._dialect = learn_dialect(self._renderer, self.now)
        closes = learn_closes(self._renderer, self._encoder, self._dialect, self._known, self.now)
        self._deriver = Deriver(self._renderer, self._encoder, self._known, closes)
        learner = Learner(self._deriver, self._renderer, self._encoder, self._dialect)
        self._cache = Cache(learner, self._renderer, self._encoder, injection)
        self.audit_failures: deque[str] = deque(maxlen=16)
        self._uses: dict[object, int] = {}
        self.close_ids: frozenset[int] = closes.ids
        self.stop_ids: frozenset[int] = self._known | closes.ids

    def _known_stops(self, close_tokens: Sequence[str | int]) -> frozenset[int]:
        """Return the ids of the tokenizer's eos, of a generation config lying beside it, and of the caller."""
        known = {self.tokenizer.eos_token_id} | set(generation_config_stops(self.tokenizer))
        by_text = self._encoder.by_text
        for token in close_tokens:
            text = isinstance(token, str) and token in by_text
            id_ = by_text[str(token)].id if text else token if isinstance(token, int) else None
            if id_ not in self._encoder.by_id:
                raise ChatTemplateError("unknown-close-token", f"{token!r} is not a control token of this tokenizer")
            known.add(id_)
        return frozenset(known - {None})

    @property
    def source(self) -> str:
        """The template's own text, as used where there are tools."""
        return self._renderer.source

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        return self._encoder.decode(ids)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, now: datetime | None = None
    ) -> list[int]:
        """Return the ids of a conversation that the model continues.

        Raises:
            ChatTemplateError: see the rules in :mod:`fsm_rollout.chat`.

        """
        return self.prompt_detailed(messages, tools, now=now).ids

    def prompt_detailed(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, now: datetime | None = None
    ) -> Encoded:
        """Return what :meth:`prompt` does, with the guarded control tokens: how many, and where."""
        now, tools = now or self.now, shown_tools(tools)
        key = self._cache.prompt_key(messages, tools, now)
        known = None if key is None else self._cache.prompt(key, messages[-1]["content"])
        if known is not None:
            return known
        result = self.prompt_reference(messages, tools, now=now)
        if key is not None:
            self._cache.learn_prompt(key, conform(messages, self._dialect), tools, now, result)
        return result

    def prompt_reference(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, now: datetime | None = None
    ) -> Encoded:
        """Return the prompt from one full render, without any cache.

        Text of user and tool messages is the environment's; that of system and assistant messages is the
        author's and the model's, and may hold control tokens.
        """
        tools, now = shown_tools(tools), now or self.now
        view = conform(messages, self._dialect)
        if not view:
            raise ChatTemplateError("malformed-message", "a prompt needs at least one message")
        text = self._renderer.render(view, tools, now)
        foreign = [index for index, message in enumerate(view) if message["role"] not in AUTHORED]
        parts = self._deriver.prompt_parts(view, foreign, tools, now, text)
        return self._encoder.encode_parts(parts, self.injection)

    def glue(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
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
        return self.glue_detailed(
            history, new_messages, tools, sampled_ids=sampled_ids, finish_reason=finish_reason, now=now
        ).ids

    def glue_detailed(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        *,
        sampled_ids: Sequence[int],
        finish_reason: str,
        now: datetime | None = None,
    ) -> Encoded:
        """Return what :meth:`glue` does, with the guarded control tokens: how many, and where."""
        sampled, tools = self._stop_of(sampled_ids, finish_reason), shown_tools(tools)
        step = self._cache.step(history, new_messages, tools, sampled)
        known = None if step is None else self._cache.glue(step)
        if known is not None:
            return known
        case = self._derive_checked(history, new_messages, tools, sampled, now or self.now)
        result = self._encode(case.glue, sampled)
        if step is not None:
            self._cache.learn(step, case, result, dropped=int(self._was_sampled(case.glue, sampled)))
        return result

    def glue_reference(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        *,
        sampled_ids: Sequence[int],
        finish_reason: str,
        now: datetime | None = None,
    ) -> Encoded:
        """Return the glue from full renders of the whole history, without any cache."""
        sampled = self._stop_of(sampled_ids, finish_reason)
        return self._encode(self._derive_checked(history, new_messages, tools, sampled, now or self.now).glue, sampled)

    def _derive_checked(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        sampled: int | None,
        now: datetime,
    ) -> Case:
        """Derive in the template's own dialect; if there is no answer in that, in the other forms of a call."""
        tools = shown_tools(tools)
        check_turns(history, new_messages)
        last = len(history) - 1
        own = self._dialect
        failure: ChatTemplateError | None = None
        for dialect in (
            own,
            replace(own, arguments_as_text=not own.arguments_as_text),
            replace(own, empty_as_none=not own.empty_as_none),
            Dialect(not own.arguments_as_text, not own.empty_as_none),
        ):
            view = conform([*history, *new_messages], dialect)
            self._refuse_marked_names(view[last:])
            base, turn, new = view[:last], view[last], view[last + 1 :]
            try:
                glue = self._deriver.derive(base, turn, new, tools, sampled, now)
            except ChatTemplateError as error:
                failure = failure or error
                if error.rule not in RETRIED or not any(message.get("tool_calls") for message in view):
                    break
            else:
                return Case(base, turn, new, tools, sampled, now, glue)
        assert failure is not None
        raise failure

    def cached(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        *,
        sampled_ids: Sequence[int],
        finish_reason: str,
    ) -> bool:
        """Return whether :meth:`glue` would answer this from a scaffold, without a render."""
        sampled = self._stop_of(sampled_ids, finish_reason)
        step = self._cache.step(history, new_messages, shown_tools(tools), sampled)
        return step is not None and self._cache.serves(step)

    def must_split(
        self, history: Sequence[Mapping[str, Any]], new_messages: Sequence[Mapping[str, Any]], tools: Tools | None
    ) -> bool:
        """Return whether the caller must close the stream and open the next with ``prompt(history + new)``.

        With ``history="split"`` that is so wherever a user speaks: templates drop reasoning and rewrite old
        turns there. The closed stream keeps every sampled token with mask 1; in the new one everything,
        old turns included, is prompt (mask 0), so each sampled token is trained exactly once.
        """
        return self.history == "split" and "user" in roles_of(new_messages)

    def audit_due(self, entry: object) -> bool:
        """Say whether this use of a cache entry shall be audited: the first ones are, then one in so many."""
        uses = self._uses[entry] = self._uses.get(entry, 0) + 1
        return uses <= AUDIT_FIRST or uses % AUDIT_EVERY == 0

    def audit(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        encoded: Encoded,
        *,
        sampled_ids: Sequence[int],
        finish_reason: str,
        now: datetime | None = None,
    ) -> GlueMismatchError | None:
        """Compare what :meth:`glue_detailed` gave for these arguments with the reference; return how they differ.

        It takes full renders, milliseconds that no turn should wait for. After a difference this template is served by
        the reference alone; the caller has to end every trajectory that used ``encoded.entry``, and those only.
        """
        got = f"the cache gave {self.decode(encoded.ids)!r}"
        try:
            expected = self.glue_reference(
                history, new_messages, tools, sampled_ids=sampled_ids, finish_reason=finish_reason, now=now
            ).ids
        except ChatTemplateError as error:
            mismatch = GlueMismatchError(f"{got}, the full render is refused: {error}", encoded.entry)
        else:
            if encoded.ids == expected:
                return None
            mismatch = GlueMismatchError(f"{got}, the full render {self.decode(expected)!r}", encoded.entry)
        self._cache.distrust()
        self.audit_failures.append(str(mismatch))
        log.warning("chat template audit failed, its cache is off from here: %s", mismatch)
        return mismatch

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

    def _stop_of(self, sampled_ids: Sequence[int], finish_reason: str) -> int | None:
        """Return the stop token a turn ended in, or None if it was cut."""
        if not isinstance(finish_reason, str) or finish_reason not in tuple(FinishReason):
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

    def _encode(self, glue: Glue, sampled: int | None) -> Encoded:
        """Encode the glue as it stands after the close token, and drop that token where it was sampled.

        Encoded together, since white space beside a token may belong to it (``rstrip``). A turn that stopped
        on another stop token needs no close, unless the close is also the next message's header.
        """
        whole = self._encoder.encode_parts([Part(glue.close.text), *glue.parts], self.injection)
        if whole.ids[:1] != [glue.close.id]:
            raise ChatTemplateError("no-close-token", f"{glue.close.text!r} is not encoded as one token")
        return whole.after(1) if self._was_sampled(glue, sampled) else whole

    def _was_sampled(self, glue: Glue, sampled: int | None) -> bool:
        """Return whether the sampled stop token stands for the close."""
        if sampled is None or sampled == glue.close.id:
            return sampled is not None
        return not glue.opener and (sampled in self.stop_ids or self._encoder.by_id[sampled].special)
