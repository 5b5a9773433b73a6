"""ChatTemplate: prompts and glue as token ids, through a cache held equal to the reference.

Invariant: ``glue`` and ``prompt`` give what ``glue_reference`` and ``prompt_reference`` give, refusals included;
the cache is a matter of time only.
"""

from __future__ import annotations

import json
import logging
import marshal
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fsm_rollout.chat.adjacency import Adjacency
from fsm_rollout.chat.closing import learn_closes, learn_dialect
from fsm_rollout.chat.derivation import Deriver, Glue
from fsm_rollout.chat.learning import Case, Learner, serves
from fsm_rollout.chat.markers import Injection, Part, encoder_for
from fsm_rollout.chat.messages import Dialect, Message, conform, malformed
from fsm_rollout.chat.rendering import Renderer, Tools
from fsm_rollout.chat.scaffold import Recent, Scaffold
from fsm_rollout.chat.shape import Shape, shape_of
from fsm_rollout.chat.tested_text import TestedText
from fsm_rollout.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["keep", "split"]

log = logging.getLogger(__name__)

AUTHORED = frozenset({"system", "developer", "assistant"})
"""Roles whose text in a prompt is not the environment's."""

RETRIED = frozenset({"template-raised", "turn-dropped", "no-close-token"})
"""Refusals that another form of a tool call may avoid."""

UNSERVED = Scaffold((), ())
"""Stands in a cache for a shape that only the reference can serve."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and how many control tokens written in messages were encoded as plain text."""

    ids: list[int]
    guarded: int = 0


class ChatTemplate:
    """A model's chat template as token ids; cheap to share, keeps no state of any trajectory.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: used instead of the tokenizer's own.
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
        chat_template: str | Mapping[str, str] | None = None,
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
        self._tested = TestedText(self._renderer.trees())
        self._learner = Learner(self._deriver, self._renderer, self._encoder, self._dialect)
        self._scaffolds: Recent[Hashable, Scaffold] = Recent(4096)
        self._by_shape: Recent[Hashable, Scaffold] = Recent(1024)
        self._prompts: Recent[Hashable, Scaffold] = Recent(256)
        self._tools: Recent[tuple[int, ...], tuple[int, tuple[object, ...]]] = Recent(1024)
        self._digests: Recent[Hashable, int] = Recent(1024)
        self._tools_seen = 0
        self._adjacency = Adjacency()
        self._distrusted = False
        self.audit_failures: deque[str] = deque(maxlen=16)
        self.close_ids: frozenset[int] = closes.ids
        self.stop_ids: frozenset[int] = self._known | closes.ids

    def _known_stops(self, close_tokens: Sequence[str | int]) -> frozenset[int]:
        """Return the ids of the tokenizer's eos, of a generation config lying beside it, and of the caller."""
        known = {self.tokenizer.eos_token_id} | set(generation_config_stops(self.tokenizer))
        by_text = self._encoder.by_text
        for token in close_tokens:
            id_ = token if isinstance(token, int) else by_text[token].id if token in by_text else None
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
        """Return what :meth:`prompt` does, with the count of guarded control tokens."""
        now = now or self.now
        key = None if self._distrusted else self._prompt_shape(messages, tools, now)
        if key is None:
            return self.prompt_reference(messages, tools, now=now)
        content = messages[-1]["content"]
        scaffold = self._prompts.get(key)
        if scaffold is None:
            view = conform(messages, self._dialect)
            text = self._renderer.render(view, tools or None, now)
            scaffold = self._learner.learn_prompt(view, len(view) - 1, tools or None, now, text) or UNSERVED
            self._prompts.put(key, scaffold)
        if scaffold is UNSERVED or self._tested.may_matter(content):
            return self.prompt_reference(messages, tools, now=now)
        return Encoded(*scaffold.encode([content], self._encoder, self.injection))

    def prompt_reference(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, now: datetime | None = None
    ) -> Encoded:
        """Return the prompt from one full render, without any cache.

        Text of user and tool messages is the environment's; that of system and assistant messages is the
        author's and the model's, and may hold control tokens.
        """
        view, now = conform(messages, self._dialect), now or self.now
        if not view:
            raise ChatTemplateError("malformed-message", "a prompt needs at least one message")
        text = self._renderer.render(view, tools or None, now)
        foreign = [index for index, message in enumerate(view) if message["role"] not in AUTHORED]
        parts = self._deriver.prompt_parts(view, foreign, tools or None, now, text)
        return Encoded(*self._encoder.encode_parts(parts, self.injection))

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
        """Return what :meth:`glue` does, with the count of guarded control tokens."""
        sampled = self._stop_of(sampled_ids, finish_reason)
        shape = None if self._distrusted else shape_of(history, new_messages, self._adjacency)
        if shape is not None:
            key = (sampled, self._tools_key(tools), shape.key, shape.pairs)
            scaffold = self._scaffolds.get(key)
            if scaffold is None:
                return self._learn(key, history, new_messages, tools, sampled, now or self.now, shape)
            if scaffold is not UNSERVED and not any(map(self._tested.may_matter, shape.contents)):
                return Encoded(*scaffold.encode(shape.values(), self._encoder, self.injection))
        glue = self._derive_checked(history, new_messages, tools, sampled, now or self.now).glue
        return self._encode(glue, sampled)

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
                glue = self._deriver.derive(base, turn, new, tools or None, sampled, now)
            except ChatTemplateError as error:
                failure = failure or error
                if error.rule not in RETRIED or not any(message.get("tool_calls") for message in view):
                    break
            else:
                return Case(base, turn, new, tools or None, sampled, now, glue)
        assert failure is not None
        raise failure

    def _learn(
        self,
        key: Hashable,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        sampled: int | None,
        now: datetime,
        shape: Shape,
    ) -> Encoded:
        """Serve a shape seen for the first time by the reference, and learn its scaffold for the next time.

        A scaffold learned with other tools or another order of roles is taken over if it gives what the
        reference gives.
        """
        case = self._derive_checked(history, new_messages, tools, sampled, now)
        result = self._encode(case.glue, sampled)
        if any(map(self._tested.may_matter, shape.contents)):
            return result  # learn from text the template does not look at
        general = (sampled, shape.key)
        scaffold = self._by_shape.get(general)
        if scaffold is None or scaffold is UNSERVED or not serves(scaffold, case):
            dropped = int(self._was_sampled(case.glue, sampled))
            scaffold = self._learner.learn(case, dropped) or UNSERVED
            if scaffold is not UNSERVED and scaffold.encode(shape.values(), self._encoder, self.injection) != (
                result.ids,
                result.guarded,
            ):
                scaffold = UNSERVED
            self._by_shape.put(general, scaffold)
        self._scaffolds.put(key, scaffold)
        return result

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
        shape = None if self._distrusted else shape_of(history, new_messages, self._adjacency)
        if shape is None or any(map(self._tested.may_matter, shape.contents)):
            return False
        key = (self._stop_of(sampled_ids, finish_reason), self._tools_key(tools), shape.key, shape.pairs)
        return self._scaffolds.get(key) not in (None, UNSERVED)

    def _tools_key(self, tools: Tools | None) -> int:
        """Return a number that is the same for the same tool schemas.

        Known by identity, so the cost does not grow with what the schemas say; the objects are kept alive,
        so an identity is not taken over. Equal schemas in other objects get the same number once.
        """
        if not tools:
            return 0
        identity = tuple(map(id, tools))
        known = self._tools.get(identity)
        if known is None:
            try:
                digest: Hashable = marshal.dumps(list(tools), 2)
            except ValueError:
                digest = identity
            number = self._digests.get(digest)
            if number is None:
                self._tools_seen += 1
                number = self._digests.put(digest, self._tools_seen)
            known = self._tools.put(identity, (number, tuple(tools)))
        return known[0]

    def _prompt_shape(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, now: datetime
    ) -> Hashable | None:
        """Return the key of prompts that differ in their last message's text; None for all but the plain ones."""
        try:
            *before, last = messages
            content = last["content"]
            if last["role"] != "user" or len(last) != 2 or type(content) is not str or not content.strip():
                return None
            if len(before) > 1:
                return None
            system = None
            if before:
                system = before[0]["content"]
                if before[0]["role"] != "system" or len(before[0]) != 2 or type(system) is not str:
                    return None
        except (KeyError, TypeError, ValueError):
            return None
        return (self._tools_key(tools), system, now if self._renderer.uses_clock else None)

    def must_split(
        self, history: Sequence[Mapping[str, Any]], new_messages: Sequence[Mapping[str, Any]], tools: Tools | None
    ) -> bool:
        """Return whether the caller must close the stream and open the next with ``prompt(history + new)``.

        With ``history="split"`` that is so wherever a user speaks: templates drop reasoning and rewrite old
        turns there. The closed stream keeps every sampled token with mask 1; in the new one everything,
        old turns included, is prompt (mask 0), so each sampled token is trained exactly once.
        """
        return self.history == "split" and any(message.get("role") == "user" for message in new_messages)

    def audit(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        sampled_ids: Sequence[int],
        finish_reason: str,
        ids: Sequence[int],
        *,
        now: datetime | None = None,
    ) -> bool:
        """Compare ``ids``, which :meth:`glue` gave, with the reference; return whether they agree.

        Takes full renders, so call it off the hot path, once per trajectory. After a disagreement this
        template is served by the reference alone; it is kept in ``audit_failures`` and logged.
        """
        try:
            expected = self.glue_reference(
                history, new_messages, tools, sampled_ids=sampled_ids, finish_reason=finish_reason, now=now
            ).ids
            problem = f"cache gave {self.decode(ids)!r}, reference {self.decode(expected)!r}"
        except ChatTemplateError as error:
            expected, problem = None, f"cache gave {self.decode(ids)!r}, reference refuses: {error}"
        if expected is not None and list(ids) == expected:
            return True
        self._distrusted = True
        self._scaffolds.clear()
        self._prompts.clear()
        self.audit_failures.append(problem)
        log.warning("chat template audit failed, its cache is off from here: %s", problem)
        return False

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
        if finish_reason in ("length", "abort"):
            return None
        if finish_reason != "stop":
            raise ChatTemplateError(
                "unknown-option", f"finish_reason must be stop, length or abort, got {finish_reason!r}"
            )
        last = int(sampled_ids[-1]) if len(sampled_ids) else None
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
        ids, guarded = self._encoder.encode_parts([Part(glue.close.text), *glue.parts], self.injection)
        if ids[:1] != [glue.close.id]:
            raise ChatTemplateError("no-close-token", f"{glue.close.text!r} is not encoded as one token")
        return Encoded(ids[1:] if self._was_sampled(glue, sampled) else ids, guarded)

    def _was_sampled(self, glue: Glue, sampled: int | None) -> bool:
        """Return whether the sampled stop token stands for the close."""
        if sampled is None or sampled == glue.close.id:
            return sampled is not None
        return not glue.opener and (sampled in self.stop_ids or self._encoder.by_id[sampled].special)


def check_turns(history: Sequence[Mapping[str, Any]], new_messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a history that does not end in an assistant turn, and new messages that hold one."""
    try:
        roles = [message.get("role") for message in new_messages]
        last = history[-1].get("role")
    except (AttributeError, IndexError, KeyError, TypeError):
        raise malformed(0, "history and new_messages must be lists of dicts, history not empty") from None
    if last != "assistant":
        raise malformed(len(history) - 1, f"the history must end in the assistant's turn, not in {last!r}")
    if not roles:
        raise ChatTemplateError("no-new-message", "there is no new message to put after the assistant's turn")
    if "assistant" in roles:
        raise ChatTemplateError("assistant-in-new", "new messages must hold no assistant turn: it was not sampled")


def generation_config_stops(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the eos ids of the ``generation_config.json`` beside the tokenizer, if it is on this machine."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    path: object = Path(name) / "generation_config.json" if name else None
    if name and not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            path = try_to_load_from_cache(name, "generation_config.json")
        except ValueError:  # not a repository's name
            path = None
    try:
        stops = json.loads(Path(path).read_text("utf-8")).get("eos_token_id") if isinstance(path, (str, Path)) else None
    except (OSError, ValueError, AttributeError):
        return []
    found = stops if isinstance(stops, list) else [stops]
    return [stop for stop in found if isinstance(stop, int)]
