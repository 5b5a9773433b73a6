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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.chat.markers import Marker, MarkerEncoder
from fsm_rollout.chat.messages import Dialect
from fsm_rollout.chat.render import Renderer
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TURN = "zqTurnProbe7"
NEXT = "zqNextProbe8"
KEY = "zqKeyProbe9"
PROBE_TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {KEY: {"type": "string", "description": "A value."}},
                "required": [KEY],
            },
        },
    },
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


def probe_call(dialect: Dialect, value: str = TURN) -> Message:
    """Return an assistant turn that calls the probe tool."""
    arguments: object = {KEY: value}
    if dialect.arguments_as_text:
        arguments = f'{{"{KEY}": "{value}"}}'
    call = {"id": "c00001000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": None if dialect.empty_as_none else "", "tool_calls": [call]}


def probe_result(text: str = NEXT) -> Message:
    """Return the tool message that answers :func:`probe_call`."""
    return {"role": "tool", "content": text, "name": "probe", "tool_call_id": "c00001000"}


def learn_dialect(renderer: Renderer, now: datetime) -> Dialect:
    """Find how the template wants tool calls: the first form that renders and shows the arguments.

    A dict printed by Python's ``repr`` (single quotes) is not what any model was trained on, so such a
    template gets text.
    """
    forms = [Dialect(text, none) for none in (False, True) for text in (False, True)]
    for form in forms:
        try:
            shown = renderer.render(
                [{"role": "user", "content": "u"}, probe_call(form), probe_result()], PROBE_TOOLS, now
            )
        except ChatTemplateError:
            continue
        if TURN in shown and f"'{KEY}'" not in shown:
            return form
    return Dialect()


def learn_closes(
    renderer: Renderer, encoder: MarkerEncoder, dialect: Dialect, known: frozenset[int], now: datetime
) -> Closes:
    """Probe a text turn followed by a user message, and a tool turn followed by its result."""
    user: Message = {"role": "user", "content": NEXT}
    system: Message = {"role": "system", "content": "s"}
    header: frozenset[int] = frozenset()
    text: Marker | None = None
    tool: Marker | None = None
    openers: set[int] = set()
    lead: frozenset[int] = frozenset()
    for base in ([user], [system, user]):
        try:
            shown = renderer.render(base, None, now, generation=False)
            asked = renderer.render(base, None, now)
        except ChatTemplateError:
            continue
        header = _last_run(shown.partition(NEXT)[0], encoder) - known
        # What opens the model's own turn cannot be what it says when it is done.
        own = frozenset(marker.id for _, marker in encoder.find(asked[len(common_prefix(shown, asked)) :]))
        turn: Message = {"role": "assistant", "content": TURN}
        found = _probe(renderer, encoder, [*base, turn], user, None, now)
        if found and text is None:
            text, is_opener = _text_close(*found[:4], known, header)
            if text and is_opener and text.id in own:
                text = None
            if text and is_opener:
                openers.add(text.id)
            elif text and text in found[0]:
                lead = _last_run(found[3].partition(text.text)[0], encoder)
        also = known | ({text.id} if text and text.id not in openers else frozenset())
        found = _probe(renderer, encoder, [*base, probe_call(dialect)], probe_result(), PROBE_TOOLS, now)
        if found and tool is None:
            each = _written_per_call(renderer, encoder, base, dialect, now) - also
            both, only_last, only_followed = ([m for m in markers if m.id not in each] for markers in found[:3])
            tool, is_opener = _tool_close(both, only_last, only_followed, found[4], also)
            if tool and is_opener and tool.id in own:
                tool = None
            if tool and is_opener:
                openers.add(tool.id)
    return Closes(text, tool, frozenset(openers), lead)


def _last_run(opening: str, encoder: MarkerEncoder) -> frozenset[int]:
    """Return the unbroken run of markers nearest to the end of ``opening``."""
    ids: set[int] = set()
    follower = None
    for at, marker in reversed(encoder.find(opening)):
        if follower is not None and at + len(marker.text) != follower:
            break
        ids.add(marker.id)
        follower = at
    return frozenset(ids)


def _probe(
    renderer: Renderer,
    encoder: MarkerEncoder,
    messages: list[Message],
    after: Message,
    tools: Sequence[Message] | None,
    now: datetime,
) -> tuple[list[Marker], list[Marker], list[Marker], str, str] | None:
    """Return the markers written after the turn, by both renders, only when it is last and only when not.

    With them the text that both write there, and all that stands before the next message's text.
    """
    try:
        last = renderer.render(messages, tools, now, generation=False)
        followed = renderer.render([*messages, after], tools, now)
    except ChatTemplateError:
        return None
    if TURN not in last or TURN not in followed:
        return None
    tail = last.rpartition(TURN)[2]
    region = followed.rpartition(TURN)[2].partition(NEXT)[0]
    shared = common_prefix(tail, region)
    tail_markers, region_markers = encoder.find(tail), encoder.find(region)
    # Compared as markers, since two markers may share their first characters.
    both = [
        marker for at, marker in region_markers if (at, marker) in tail_markers and at + len(marker.text) <= len(shared)
    ]
    return both, [m for _, m in tail_markers[len(both) :]], [m for _, m in region_markers[len(both) :]], shared, region


def _text_close(
    both: list[Marker],
    only_last: list[Marker],
    only_followed: list[Marker],
    shared: str,
    known: frozenset[int],
    header: frozenset[int],
) -> tuple[Marker | None, bool]:
    """Return what ends a text turn, and whether it is an opener."""
    for marker in both:
        if marker.id in known:
            return marker, False
    candidates = [marker for marker in both if marker.id not in header]
    candidates = _flagged(candidates)
    if candidates:
        # Of a run such as <|END_RESPONSE|><|END_OF_TURN_TOKEN|> the last one ends the turn.
        close = candidates[0]
        for marker in candidates[1:]:
            if close.text + marker.text not in shared:
                break
            close = marker
        return close, False
    if any(marker.id not in header for marker in _flagged(only_last)):
        # The last turn ends with a token of its own (gpt-oss: <|return|>), a followed one with another.
        unlike = _flagged([marker for marker in only_followed if marker.id not in header])
        return (unlike[0], False) if unlike else (None, False)
    remaining = _flagged([*both, *only_followed])
    # What is written after the last turn too ends it, even where user turns seem to open with it.
    return (remaining[0], remaining[0] not in both) if remaining else (None, False)


def _tool_close(
    both: list[Marker], only_last: list[Marker], only_followed: list[Marker], region: str, known: frozenset[int]
) -> tuple[Marker | None, bool]:
    """Return what ends a tool turn, and whether it is an opener: a header of one control token, not of a run."""
    for marker in both:
        if marker.id in known:
            return marker, False
    every = (both, only_last, only_followed)
    for ends, last, following in ([[m for m in some if m.special] for some in every], every):
        if ends:
            return ends[-1], not following
        if following and not last and not any(following[0].text + other.text in region for other in following[1:]):
            return following[0], True
    return None, False


def _flagged(markers: list[Marker]) -> list[Marker]:
    """Return those flagged special, or all: some vocabularies flag none of their control tokens."""
    return [marker for marker in markers if marker.special] or markers


def _written_per_call(
    renderer: Renderer, encoder: MarkerEncoder, base: list[Message], dialect: Dialect, now: datetime
) -> frozenset[int]:
    """Return the markers written once per call rather than once per turn."""
    single = probe_call(dialect)
    (call,) = single["tool_calls"]
    double = {**single, "tool_calls": [call, {**call, "id": "c00001001"}]}
    try:
        fewer, more = (
            Counter(
                marker.id
                for _, marker in encoder.find(renderer.render([*base, turn], PROBE_TOOLS, now, generation=False))
            )
            for turn in (single, double)
        )
    except ChatTemplateError:  # one call at a time is all this template allows
        return frozenset()
    return frozenset(more - fewer)


def common_prefix(first: str, second: str) -> str:
    """Return the longest text both start with."""
    return os.path.commonprefix([first, second])  # noqa: RUF071 (characters are meant)


def first_close(
    found: Sequence[tuple[int, Marker]], preference: Iterable[frozenset[int]], lead: frozenset[int] = frozenset()
) -> tuple[int, Marker] | None:
    """Choose the close among the markers between a turn's text and the next message's: first set wins.

    With ``lead`` the choice moves back over those of its markers that stand right before the close.
    """
    for wanted in preference:
        for index, (position, marker) in enumerate(found):
            if marker.id in wanted:
                for before, leading in reversed(found[:index]):
                    if leading.id not in lead or before + len(leading.text) != position:
                        break
                    position, marker = before, leading
                return position, marker
    return None


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
