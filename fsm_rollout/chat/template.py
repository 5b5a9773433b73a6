"""ChatTemplate: prompts and glue as token ids, through a cache held equal to the reference.

Invariant: :meth:`ChatTemplate.encode` gives what the reference gives (:mod:`fsm_rollout.chat.reference`), refusals
included; the cache only saves time. Some of its answers are audited, and what an audit finds wrong is named by its
entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from fsm_rollout.chat.derive import Deriver
from fsm_rollout.chat.glue_cache import GlueCache, GlueTemplate, Shape
from fsm_rollout.chat.glue_learning import GlueLearner
from fsm_rollout.chat.markers import LONG_TEXT, Encoded, Injection, encoder_for
from fsm_rollout.chat.messages import PICTURE, Messages, conform, pictures_of, roles_of
from fsm_rollout.chat.pictures import PictureReader, pads_of
from fsm_rollout.chat.reference import FollowUp, Opening, Reference
from fsm_rollout.chat.render import Renderer, TemplateSource, Tools, shown_tools
from fsm_rollout.chat.thinking import ThinkingTags, find_thinking
from fsm_rollout.chat.turn_ends import CloseFinder, generation_config_stops, learn_dialect
from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.errors import ChatTemplateError, GlueMismatchError
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["keep", "split"]

log = logging.getLogger(__name__)

# Long prompts whose ids are kept for the other samples of their groups, and beginnings of such whose ids are kept.
LONG_KEPT = 16
_long_texts = DaemonThreads("fsm-rollout-encode", 1)  # one after the other: what each makes of it takes the GIL


class ChatTemplate:
    """A model's chat template as token ids; cheap to share, keeps no state of any trajectory.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: used instead of the processor's or tokenizer's own: text, texts by name, or the name of one of
            the tokenizer's.
        template_kwargs: further variables of the template, e.g. ``enable_thinking``.
        close_tokens: tokens (text or ids) that end an assistant turn, beside those found out.
        injection: what to do with control tokens in message text: ``guard`` (encode them as plain text), ``allow``
            or ``raise``.
        history: ``keep`` or ``split``, see :meth:`must_split`.
        now: what the template's clock says unless a call says otherwise; by default the time of construction.
        processor: a transformers processor, of a model that sees pictures.

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
        processor: Any = None,
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
        self.decode = self._encoder.decode
        """Returns the text of ids, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        chat_template = chat_template or getattr(processor, "chat_template", None)
        self._renderer = Renderer(tokenizer, chat_template, template_kwargs)
        configured_stops = self._known_stops(close_tokens)
        dialect = learn_dialect(self._renderer, self.now)
        closes = CloseFinder(self._renderer, self._encoder, dialect, configured_stops, self.now).closes()
        deriver = Deriver(self._renderer, self._encoder, configured_stops, closes)
        self.audit_failures: deque[str] = deque(maxlen=16)
        self.close_ids: frozenset[int] = closes.ids
        self.stop_ids: frozenset[int] = configured_stops | closes.ids
        reader, blind = None, "this model reads text only"
        if processor is not None:
            try:
                reader = PictureReader(processor, self._renderer, self._encoder, self.now)
            except ChatTemplateError as error:  # an agent that shows none may have a template that shows none
                blind = str(error)
        self.pads: frozenset[int] = pads_of(processor) if reader is None else reader.pads
        """Ids that stand for pictures, and mean nothing where none stands; none: the model reads text only."""
        self.reference = Reference(deriver, dialect, injection, self.stop_ids, self.now, reader, blind)
        self._cache = GlueCache(self.reference)
        self._learner = GlueLearner(self._cache, self.reference)
        # What the thread of long texts knows: the ids of prompts, by shape and last text, and of those of one shape.
        self._long: dict[tuple[Hashable, str], Encoded] = {}
        self._alike: dict[Hashable, GlueTemplate | None] = {}

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

    @property
    def sees(self) -> bool:
        """Whether the model sees pictures."""
        return self.reference.reader is not None

    def hidden_tools(self, system: str | None, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the names of tools that stand nowhere in a prompt that has them."""
        if not tools:
            return []
        messages = [{"role": "system", "content": system}] if system else []
        try:
            text = self._renderer.render([*messages, {"role": "user", "content": "?"}], tools, self.now)
        except ChatTemplateError:
            return []  # what it refuses is told where it is used
        return [name for tool in tools if (name := str(tool["function"]["name"])) not in text]

    @cached_property
    def drops_results_pictures(self) -> str:
        """Why pictures cannot stand in a tool's result; empty: they can."""
        reader, reference = self.reference.reader, self.reference
        if reader is None:
            return reference.blind
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
        shown = {"role": "tool", "name": "look", "tool_call_id": call["id"], "content": [PICTURE]}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: Messages = [{"role": "user", "content": "?"}, turn, shown]
        try:
            text = self._renderer.render(conform(messages, reference.dialect), None, self.now)
        except ChatTemplateError as error:
            return f"the template takes no picture in a tool's result: {error}"
        if any(marker.id == reader.placeholder for _, marker in self._encoder.find(text)):
            return ""
        return "the template drops pictures in tools' results; give one that writes them (`chat_template`)"

    async def sizes_in_results(self, pictures: Sequence[StoredPicture]) -> list[int]:
        """Return how many tokens each picture has in a tool's result.

        Raises:
            ChatTemplateError: ``multimodal-content``: the model, or the template there, shows none.
            PictureError: the processor does not take one of them.

        """
        if self.drops_results_pictures:
            raise ChatTemplateError("multimodal-content", self.drops_results_pictures)
        reader = self.reference.reader
        assert reader is not None
        if new := [picture for picture in pictures if not reader.knows(picture)]:
            await asyncio.to_thread(reader.see, new)
        return [len(reader.seen(picture).ids) for picture in pictures]

    @cached_property
    def thinking(self) -> ThinkingTags:
        """How the model's thinking stands in its turn; ChatTemplateError ``no-thinking``: nowhere."""
        return find_thinking(self._renderer, self._encoder, self.stop_ids, self.now)

    @cached_property
    def thinks(self) -> ThinkingTags | None:
        """The same; ``None``: nowhere."""
        try:
            return self.thinking
        except ChatTemplateError:
            return None

    # --- prompts and glue

    def prompt(self, messages: Messages, tools: Tools | None, *, now: datetime | None = None) -> list[int]:
        """Return the ids of a conversation that the model continues.

        Raises:
            ChatTemplateError: see the rules in :mod:`fsm_rollout.chat`.

        """
        return self.encode_here(Opening(messages, shown_tools(tools), now)).ids.tolist()

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
        asked = FollowUp(history, new_messages, shown_tools(tools), sampled_ids, finish_reason, now)
        return self.encode_here(asked).ids.tolist()

    async def encode(self, asked: Opening | FollowUp) -> Encoded:
        """Return the ids of a prompt, or of what follows a turn, and whose they are.

        What would hold up the event loop is encoded in a thread, without the cache, which belongs to the loop's.
        """
        shape = self._shape(asked)
        messages = asked.messages if isinstance(asked, Opening) else asked.new
        length = sum(map(len, map(text_of, messages) if shape is None else shape.texts))
        reader = self.reference.reader
        if reader is not None and (new := [picture for picture in pictures_of(messages) if not reader.knows(picture)]):
            await asyncio.to_thread(reader.see, new)
        if length > LONG_TEXT:
            return await asyncio.get_running_loop().run_in_executor(_long_texts, self._encoded_aside, asked, shape)
        return self._encoded(asked, shape)

    def encode_here(self, asked: Opening | FollowUp) -> Encoded:
        """Do what :meth:`encode` does, in this thread, whatever the length."""
        return self._encoded(asked, self._shape(asked))

    def _shape(self, asked: Opening | FollowUp) -> Shape | None:
        if isinstance(asked, Opening):
            return self._cache.prompt_shape(asked.messages, asked.tools, asked.now or self.now)
        return self._cache.shape(asked.history, asked.new, asked.tools, self.reference.stop_of(asked))

    def _encoded(self, asked: Opening | FollowUp, shape: Shape | None) -> Encoded:
        if shape is None:
            return self.reference.encode(asked)
        learned = self._cache.templates.get(shape.key)
        encoded = learned.encode(shape.texts) if learned is not None else self._learner.learn(shape, asked)
        if encoded is None:
            return self.reference.encode(asked)
        return encoded if self.reference.reader is None else self.reference.with_pictures(encoded, asked)

    def _encoded_aside(self, asked: Opening | FollowUp, shape: Shape | None) -> Encoded:
        """Encode in the thread of long texts; samples of one prompt, which come one after the other, share its ids."""
        if shape is None or isinstance(asked, FollowUp):
            return self.reference.encode(asked)
        key = shape.key, shape.texts[-1]
        if (encoded := self._long.get(key)) is None:
            known = self._long_prompt(asked, shape)
            encoded = self.reference.encode(asked) if known is None else self.reference.with_pictures(known, asked)
            self._long[key] = encoded
            _forget_first(self._long)
        return encoded

    def _long_prompt(self, asked: Opening, shape: Shape) -> Encoded | None:
        """Encode by what is known of prompts that differ in their last text alone: all of it, once there are two."""
        if shape.key in self._alike:
            learned = self._alike[shape.key] = self._alike.pop(shape.key)  # the one that was used last is kept longest
            return None if learned is None else learned.encode(shape.texts)
        if all(other != shape.key for other, _ in self._long):  # to learn it takes as long as to encode several
            return None
        encoded, self._alike[shape.key] = self._learner.prompt(shape, asked)
        _forget_first(self._alike)
        return encoded

    # --- policy, audit

    def must_split(self, history: Messages, new_messages: Messages, tools: Tools | None) -> bool:
        """Return whether the caller must close the stream and open the next with ``prompt(history + new)``.

        With ``history="split"`` that is so wherever a user speaks: templates drop reasoning and rewrite old
        turns there. The closed stream keeps every sampled token with mask 1; in the new one everything,
        old turns included, is prompt (mask 0), so each sampled token is trained exactly once.
        """
        return self.history == "split" and "user" in roles_of(new_messages)

    def audit(self, asked: FollowUp, encoded: Encoded) -> GlueMismatchError | None:
        """Compare what :meth:`encode` gave with the reference; return how they differ.

        It takes full renders, milliseconds that no turn should wait for. After a difference this template is served by
        the reference alone; the caller has to end every trajectory that used ``encoded.entry``, and those only.
        """
        try:
            reference = self.reference.encode(asked).ids
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


def _forget_first(kept: dict[Any, Any]) -> None:
    if len(kept) > LONG_KEPT:
        del kept[next(iter(kept))]
