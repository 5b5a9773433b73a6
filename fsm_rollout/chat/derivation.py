"""The reference: glue by sentinels over the full history, verified or refused.

Invariant: what :meth:`Deriver.derive` returns is a suffix of the template's own render of the real messages,
cut at the token that ends the last assistant turn; nothing in it depends on what that turn said.

The last assistant turn is rendered twice, each time with another sentinel in its content and in every call
argument. What the two renders end with in common cannot depend on the turn's text, so it is what follows the
sampled tokens, up to the rest of the turn (``}</tool_call>``) that was sampled too: the glue starts after
the close token. A third render, with sentinels for the new messages as well, shows where their text goes:
that tells scaffold from environment text, and a dropped message from a kept one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from fsm_rollout.chat.closing import Closes, first_close
from fsm_rollout.chat.markers import Marker, MarkerEncoder, Part
from fsm_rollout.chat.messages import Message
from fsm_rollout.chat.rendering import Renderer, Tools
from fsm_rollout.errors import ChatTemplateError

Transform = Callable[[str], str]


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


TRANSFORMS: tuple[Transform, ...] = (
    lambda text: text,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
    _as_json,
    lambda text: _as_json(text.strip()),
    lambda text: json.dumps(text)[1:-1],
    lambda text: repr(text)[1:-1],
)
"""How templates write a message's text. The order matters only where two give the same result."""


ORDERS = frozenset({"system", "developer"})
"""Roles of the author's instructions: no slots, but not to be lost either."""

UNMISTAKABLE = 32
"""Text this long that is found in a render does not stand there by chance."""


@dataclass(frozen=True, slots=True)
class Glue:
    """What stands between two generations: the close token and the text after it, scaffold told from messages.

    ``opener`` says that the close token is the header of the next message too.
    """

    close: Marker
    parts: tuple[Part, ...]
    opener: bool

    @property
    def text(self) -> str:
        """The text after the close token."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Unguessable words, one pair for the last turn and one per new message."""

    first: str
    second: str
    word: str

    @classmethod
    def draw(cls) -> Sentinels:
        """Draw fresh ones. They end in different letters, so no common suffix reaches into them."""
        return cls(f"zq{secrets.token_hex(12)}x", f"zq{secrets.token_hex(12)}y", f"zq{secrets.token_hex(12)}n")

    def new(self, index: int) -> str:
        """Return the sentinel of new message ``index``."""
        return f"{self.word}{index}m"


def marked_turns(message: Message, sentinel: str) -> Iterator[Message]:
    """Yield copies of an assistant turn with the sentinel in it, the most faithful first.

    Appending keeps a template's own look at the text (``</think>``) as it is. Content that is empty beside
    tool calls stays empty at first: filling it can change which branch of the template is taken.
    """
    calls = message.get("tool_calls")
    copy = dict(message)
    if calls:
        copy["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _marked(call["function"]["arguments"], sentinel)}}
            for call in calls
        ]
    content = message.get("content") or ""
    if content or not calls:
        yield {**copy, "content": content + sentinel}
    else:
        yield copy
    if content or calls:
        yield {**copy, "content": sentinel}


def _marked(arguments: object, sentinel: str) -> object:
    if isinstance(arguments, dict):
        return dict.fromkeys(arguments, sentinel) or {sentinel: sentinel}
    try:
        parsed = json.loads(str(arguments))
    except (ValueError, RecursionError):
        return sentinel
    return json.dumps(dict.fromkeys(parsed, sentinel) or {sentinel: sentinel}) if isinstance(parsed, dict) else sentinel


class Deriver:
    """Derives glue for one template. ``known`` are the stop tokens given by tokenizer, config and caller."""

    def __init__(self, renderer: Renderer, encoder: MarkerEncoder, known: frozenset[int], closes: Closes) -> None:
        self.renderer = renderer
        self.encoder = encoder
        self.known = known
        self.closes = closes
        text = frozenset({closes.text.id}) if closes.text else frozenset()
        self._usual = (text - closes.openers, closes.openers)
        self._cut = ((text | closes.ids) - closes.openers, closes.openers)

    def derive(
        self,
        base: list[Message],
        turn: Message,
        new: list[Message],
        tools: Tools | None,
        sampled: int | None,
        now: datetime,
    ) -> Glue:
        """Return the glue between ``turn`` and the next generation; ``sampled`` is the stop token, if any.

        Raises:
            ChatTemplateError: any rule of :mod:`fsm_rollout.chat` about a turn or a message.

        """
        sentinels = Sentinels.draw()
        before, after = self._common_suffix(base, turn, new, tools, now, sentinels)
        pattern = self._pattern(before, new, tools, now, sentinels)
        region = pattern[0] if isinstance(pattern[0], str) else ""
        preference = (
            frozenset() if sampled is None else frozenset({sampled}),
            self.known,
            *(self._usual if sampled is not None else self._cut),
        )
        lead = self.closes.lead if sampled is None else frozenset()
        chosen = first_close(self.encoder.find(region), preference, lead)
        if chosen is None:
            raise ChatTemplateError(
                "no-close-token",
                f"the template writes no known stop token after an assistant turn, only {region[:80]!r}; "
                "without one the end of the turn and the next message cannot be told apart",
            )
        position, close = chosen
        cut = position + len(close.text)
        if not after.startswith(region[:cut]):
            raise ChatTemplateError(
                "text-moved", "what stands between the turn and its close token depends on the next message's text"
            )
        text = after[cut:]
        plain = self.renderer.render([*base, turn, *new], tools, now)
        if not plain.endswith(close.text + text):
            raise ChatTemplateError(
                "text-moved", "the text after the turn is not the same once the turn's own text stands in it"
            )
        pattern[0] = region[cut:]
        contents = [str(message["content"] or "") for message in new]
        parts = fit(pattern, contents, text) or locate(contents, text)
        return Glue(close, tuple(parts), close.id in self.closes.openers)

    def prompt_parts(
        self, messages: list[Message], foreign: Sequence[int], tools: Tools | None, now: datetime, text: str
    ) -> list[Part]:
        """Return ``text``, the render of ``messages``, with the text of the ``foreign`` ones told apart.

        Raises:
            ChatTemplateError: ``message-dropped`` or ``message-altered``.

        """
        self._refuse_dropped_orders(messages, tools, now, text)
        word = Sentinels.draw().word
        marked = list(messages)
        for index in foreign:
            marked[index] = {**messages[index], "content": f"{word}{index}m"}
        contents = [str(message["content"] or "") for message in messages]
        try:
            pattern = _cut(self.renderer.render(marked, tools, now), word)
        except ChatTemplateError:
            return locate([contents[index] for index in foreign], text)
        for index in foreign:
            if index not in pattern and contents[index]:
                raise ChatTemplateError(
                    "message-dropped", f"the template silently drops the {messages[index]['role']!r} message {index}"
                )
        return fit(pattern, contents, text) or locate([contents[index] for index in foreign], text)

    def _refuse_dropped_orders(self, messages: list[Message], tools: Tools | None, now: datetime, text: str) -> None:
        """Refuse a prompt whose system or developer message is nowhere in it.

        A template may move its text (into the first user message) or take flags out of it, so what is looked
        for is a sentinel behind the text, anywhere.
        """
        for index, message in enumerate(messages):
            said = str(message["content"] or "").strip()
            if message["role"] not in ORDERS or not said or (len(said) >= UNMISTAKABLE and said in text):
                continue
            word = Sentinels.draw().word
            marked = [*messages[:index], {**message, "content": f"{said} {word}"}, *messages[index + 1 :]]
            try:
                kept = word in self.renderer.render(marked, tools, now)
            except ChatTemplateError:  # it insists on what is said there
                kept = said in text
            if not kept:
                raise ChatTemplateError(
                    "message-dropped", f"the template silently drops the {message['role']!r} message {index}"
                )

    def _common_suffix(
        self,
        base: list[Message],
        turn: Message,
        new: list[Message],
        tools: Tools | None,
        now: datetime,
        sentinels: Sentinels,
    ) -> tuple[list[Message], str]:
        """Return the marked messages that worked, and what both renders have in common after the sentinel."""
        failure: ChatTemplateError | None = None
        pairs = zip(marked_turns(turn, sentinels.first), marked_turns(turn, sentinels.second), strict=True)
        for one, two in pairs:
            try:
                first = self.renderer.render([*base, one, *new], tools, now)
                second = self.renderer.render([*base, two, *new], tools, now)
            except ChatTemplateError as error:
                failure = failure or error
                continue
            if sentinels.first in first and sentinels.second in second:
                tails = first.rpartition(sentinels.first)[2], second.rpartition(sentinels.second)[2]
                return [*base, one], common_suffix(*tails)
        if failure is not None:
            raise failure
        raise ChatTemplateError("turn-dropped", "the template writes neither the text nor the calls of the last turn")

    def _pattern(
        self, before: list[Message], new: list[Message], tools: Tools | None, now: datetime, sentinels: Sentinels
    ) -> list[str | int]:
        """Return what follows the turn when the new messages are sentinels: text, and indices of messages."""
        marked = [{**message, "content": sentinels.new(index)} for index, message in enumerate(new)]
        whole = self.renderer.render([*before, *marked], tools, now)
        shown = whole.rpartition(sentinels.first)[2]
        pattern = _cut(shown, sentinels.word)
        for index, message in enumerate(new):
            if index not in pattern:
                if sentinels.new(index) in whole:
                    raise ChatTemplateError(
                        "text-moved",
                        f"the template writes new message {index} before the text of the turn it follows",
                    )
                raise ChatTemplateError(
                    "message-dropped", f"the template silently drops the new {message['role']!r} message {index}"
                )
        return pattern


def _cut(text: str, word: str) -> list[str | int]:
    """Split ``text`` at the sentinels ``{word}{index}m``; each stands there as its index."""
    first, *rest = text.split(word)
    pattern: list[str | int] = [first]
    for piece in rest:
        index, _, after = piece.partition("m")
        pattern += [int(index), after]
    return pattern


def common_suffix(one: str, two: str) -> str:
    """Return the longest text both end with."""
    if one == two:
        return one
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[-middle:] == two[-middle:]:
            low = middle
        else:
            high = middle - 1
    return one[len(one) - low :]


def fit(pattern: Sequence[str | int], contents: Sequence[str], text: str) -> list[Part] | None:
    """Find transforms of the contents with which the pattern gives ``text``; None if there are none."""

    def walk(index: int, position: int) -> list[Part] | None:
        if index == len(pattern):
            return [] if position == len(text) else None
        item = pattern[index]
        if isinstance(item, str):
            options: Iterator[str] = iter((item,))
        else:
            content = contents[item]
            options = (transform(content) for transform in TRANSFORMS)
        tried: set[str] = set()
        for option in options:
            if option in tried or not text.startswith(option, position):
                continue
            tried.add(option)
            rest = walk(index + 1, position + len(option))
            if rest is not None:
                return [Part(option, environment=not isinstance(item, str)), *rest]
        return None

    return walk(0, 0)


def locate(contents: Sequence[str], text: str) -> list[Part]:
    """Find the contents in ``text`` in order, whatever stands between them.

    Raises:
        ChatTemplateError: ``message-altered`` when one is not there in any known form.

    """
    parts: list[Part] = []
    start = 0
    for index, content in enumerate(contents):
        for transform in TRANSFORMS:
            form = transform(content)
            at = text.find(form, start)
            if at >= 0:
                parts += [Part(text[start:at]), Part(form, environment=True)]
                start = at + len(form)
                break
        else:
            raise ChatTemplateError("message-altered", f"the template rewrites the text of new message {index}")
    parts.append(Part(text[start:]))
    return parts
