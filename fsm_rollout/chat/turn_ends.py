"""Which token ends an assistant turn: learned from the template, not looked up by model name.

Two renders of one probe conversation are compared: one that ends with the assistant turn, one in which
another message follows. What both write after the turn's text ends the turn (*close*). Where the first
writes nothing, but the second goes straight on with a marker, that marker is the header of the next message
and the model's stop token at the same time (*opener*: GLM's ``<|user|>`` and ``<|observation|>``).
A marker that opens the assistant's turns too (``<|im_start|>``) is not taken for one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.chat.markers import Marker, MarkerEncoder
from fsm_rollout.chat.messages import Dialect, made_id
from fsm_rollout.chat.render import Renderer
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TURN = "zqTurnProbe7"
NEXT = "zqNextProbe8"
KEY = "zqKeyProbe9"
USER: Message = {"role": "user", "content": NEXT}
PROPERTIES = {KEY: {"type": "string", "description": "A value."}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": [KEY]}
PROBE_TOOLS: tuple[Message, ...] = (
    {"type": "function", "function": {"name": "probe", "description": "A probe.", "parameters": PARAMETERS}},
)


@dataclass(frozen=True, slots=True)
class Closes:
    """What ends a text turn and a tool turn; ``openers`` are those that also open the next message.

    ``lead`` are the markers a text turn's close comes in an unbroken run with, such as Command-R7B's
    ``<|END_RESPONSE|>``: the model samples them before it stops, so a turn that was cut lacks them too.
    """

    text: Marker | None
    tool: Marker | None
    openers: frozenset[int]
    lead: frozenset[int] = frozenset()

    @property
    def ids(self) -> frozenset[int]:
        """The learned closes, openers included."""
        return frozenset(marker.id for marker in (self.text, self.tool) if marker)


@dataclass(frozen=True, slots=True)
class Tails:
    """Markers behind a turn: written whether it is the last or not (``both``), only if it is, only if it is not."""

    both: list[Marker]
    only_last: list[Marker]
    only_followed: list[Marker]
    shared: str  # the text that is written in both cases
    region: str  # all that stands before the next message's text


def probe_call(dialect: Dialect, value: str = TURN) -> Message:
    """Return an assistant turn that calls the probe tool."""
    arguments: object = {KEY: value}
    if dialect.arguments_as_text:
        arguments = json.dumps(arguments)
    call = {"id": "c00001000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": None if dialect.empty_as_none else "", "tool_calls": [call]}


def probe_result(text: str = NEXT) -> Message:
    """Return the tool message that answers :func:`probe_call`."""
    return {"role": "tool", "content": text, "name": "probe", "tool_call_id": "c00001000"}


def probe_histories(dialect: Dialect, *, tools: bool) -> Iterator[list[Message]]:
    """Yield conversations that end where an assistant turn may follow, as unlike each other as they come."""

    def user(text: str = "u") -> Message:
        return {"role": "user", "content": text}

    def call(index: int) -> list[Message]:
        turn, result = probe_call(dialect, "v"), probe_result("r")
        turn["tool_calls"][0]["id"] = result["tool_call_id"] = made_id(index, 0)
        return [turn, result]

    system: Message = {"role": "system", "content": "s"}
    answer: Message = {"role": "assistant", "content": "a"}
    thought: Message = {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}
    yield [user()]
    yield [system, user()]
    yield [user(), answer, user("u2")]
    if tools:
        yield [user(), *call(1)]
        yield [system, user(), *call(2), *call(4)]
        yield [user(), *call(1), answer, user("u2")]
        yield [user(), thought, user("u2"), *call(3)]
        yield [user(), answer, user("u2"), answer, user("u3"), *call(5), answer, user("u4")]


def learn_dialect(renderer: Renderer, now: datetime) -> Dialect:
    """Find how the template wants tool calls: the first form that renders and shows the arguments.

    A dict printed by Python's ``repr`` (single quotes) is not what any model was trained on, so such a
    template gets text.
    """
    for form in (Dialect(text, none) for none in (False, True) for text in (False, True)):
        messages = [{"role": "user", "content": "u"}, probe_call(form), probe_result()]
        try:
            rendered = renderer.render(messages, PROBE_TOOLS, now)
        except ChatTemplateError:
            continue
        if TURN in rendered and f"'{KEY}'" not in rendered:
            return form
    return Dialect()


@dataclass(frozen=True, slots=True)
class CloseFinder:
    """Probes a text turn followed by a user message, and a tool turn followed by its result."""

    renderer: Renderer
    encoder: MarkerEncoder
    dialect: Dialect
    configured_stops: frozenset[int]
    now: datetime

    def closes(self) -> Closes:
        """Return what is found after a user message or, if the template insists on one, a system message before it."""
        for base in ([USER], [{"role": "system", "content": "s"}, USER]):
            try:
                rendered, with_header = self._render(base, None), self.renderer.render(base, None, self.now)
            except ChatTemplateError:
                continue
            return self._closes_after(base, rendered, with_header)
        return Closes(None, None, frozenset())

    def _closes_after(self, base: list[Message], rendered: str, with_header: str) -> Closes:
        """Return the closes of turns after ``base``, which is ``asked`` with the header of the next turn."""
        header = self._last_run(rendered.partition(NEXT)[0]) - self.configured_stops
        # A marker that opens the model's own turn cannot be the one that ends it.
        opens = {marker.id for _, marker in self.encoder.find(with_header[len(common_prefix(rendered, with_header)) :])}
        text: Marker | None = None
        tool: Marker | None = None
        opens_text = opens_tool = False
        lead: frozenset[int] = frozenset()
        if tails := self._tails([*base, {"role": "assistant", "content": TURN}], USER, None):
            text, opens_text = self._text_close(tails, header)
            if text and opens_text and text.id in opens:
                text = None
            if text and text in tails.both:
                lead = self._last_run(tails.shared.partition(text.text)[0])
        if tails := self._tails([*base, probe_call(self.dialect)], probe_result(), PROBE_TOOLS):
            stop_ids = self.configured_stops | ({text.id} if text and not opens_text else set())
            tool, opens_tool = self._tool_close(tails, stop_ids, self._written_per_call(base) - stop_ids)
            if tool and opens_tool and tool.id in opens:
                tool = None
        openers = {close.id for close, opens in ((text, opens_text), (tool, opens_tool)) if close and opens}
        return Closes(text, tool, frozenset(openers), lead)

    def _render(self, messages: list[Message], tools: Sequence[Message] | None) -> str:
        return self.renderer.render(messages, tools, self.now, generation=False)

    def _last_run(self, opening: str) -> frozenset[int]:
        """Return the unbroken run of markers nearest to the end of ``opening``."""
        ids: set[int] = set()
        follower = None
        for at, marker in reversed(self.encoder.find(opening)):
            if follower is not None and at + len(marker.text) != follower:
                break
            ids.add(marker.id)
            follower = at
        return frozenset(ids)

    def _tails(self, messages: list[Message], follower: Message, tools: Sequence[Message] | None) -> Tails | None:
        """Return what stands behind the turn that ends ``messages``; None if the template does not write the turn."""
        try:
            last = self._render(messages, tools)
            followed = self.renderer.render([*messages, follower], tools, self.now)
        except ChatTemplateError:
            return None
        if TURN not in last or TURN not in followed:
            return None
        tail = last.rpartition(TURN)[2]
        region = followed.rpartition(TURN)[2].partition(NEXT)[0]
        shared = common_prefix(tail, region)
        in_tail, in_region = self.encoder.find(tail), self.encoder.find(region)
        # Compared as markers, since two markers may share their first characters.
        both = [m for at, m in in_region if (at, m) in in_tail and at + len(m.text) <= len(shared)]
        only_last, only_followed = ([m for _, m in found[len(both) :]] for found in (in_tail, in_region))
        return Tails(both, only_last, only_followed, shared, region)

    def _text_close(self, tails: Tails, header: frozenset[int]) -> tuple[Marker | None, bool]:
        """Return what ends a text turn, and whether it is an opener."""
        for marker in tails.both:
            if marker.id in self.configured_stops:
                return marker, False
        # 1. Of a run such as <|END_RESPONSE|><|END_OF_TURN_TOKEN|> the last one ends the turn.
        candidates = _without(tails.both, header)
        # Some vocabularies flag none of their control tokens.
        candidates = [marker for marker in candidates if marker.special] or candidates
        if candidates:
            close = candidates[0]
            for marker in candidates[1:]:
                if close.text + marker.text not in tails.shared:
                    break
                close = marker
            return close, False
        # 2. The last turn ends with a token of its own (gpt-oss: <|return|>), a followed one with another.
        if _without(tails.only_last, header):
            return next(iter(_without(tails.only_followed, header)), None), False
        # 3. What is written after the last turn too ends it, even where user turns seem to open with it.
        first = next(iter([*tails.both, *tails.only_followed]), None)
        return first, first not in tails.both

    def _tool_close(
        self, tails: Tails, stop_ids: Container[int], per_call: Container[int]
    ) -> tuple[Marker | None, bool]:
        """Return what ends a tool turn, and whether it is an opener: a header of one control token, not of a run."""
        marker_lists = [_without(markers, per_call) for markers in (tails.both, tails.only_last, tails.only_followed)]
        for marker in marker_lists[0]:
            if marker.id in stop_ids:
                return marker, False
        for ends, last, following in ([[m for m in some if m.special] for some in marker_lists], marker_lists):
            if ends:
                return ends[-1], not following
            if following and not last:
                first, *others = following
                if not any(first.text + other.text in tails.region for other in others):
                    return first, True
        return None, False

    def _written_per_call(self, base: list[Message]) -> frozenset[int]:
        """Return the markers written once per call rather than once per turn."""
        single = probe_call(self.dialect)
        (call,) = single["tool_calls"]
        double = {**single, "tool_calls": [call, {**call, "id": "c00001001"}]}
        try:
            renders = [self._render([*base, turn], PROBE_TOOLS) for turn in (single, double)]
        except ChatTemplateError:  # one call at a time is all this template allows
            return frozenset()
        fewer, more = (Counter(marker.id for _, marker in self.encoder.find(text)) for text in renders)
        return frozenset(more - fewer)


def _without(markers: Iterable[Marker], ids: Container[int]) -> list[Marker]:
    return [marker for marker in markers if marker.id not in ids]


def common_prefix(first: str, second: str) -> str:
    """Return the longest text both start with."""
    return os.path.commonprefix([first, second])  # noqa: RUF071 (characters are meant)


def generation_config_stops(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the eos ids of the ``generation_config.json`` beside the tokenizer, if it is on this machine."""
    from transformers.utils import cached_file

    try:
        path = cached_file(tokenizer.name_or_path, "generation_config.json", local_files_only=True)
        stops = json.loads(Path(path).read_text("utf-8"))["eos_token_id"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or not one
        return []
    return [stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)]
