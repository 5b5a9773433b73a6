"""Glue derived from the chat template by sentinels over the full history, verified or refused: the reference.

Invariant: what :meth:`Deriver.derive` returns is a suffix of the template's own render of the real messages,
cut at the token that ends the last assistant turn; nothing in it depends on what that turn said.

The last assistant turn is rendered twice, each time with another sentinel in its content and in every call
argument. What the two renders end with in common cannot depend on the turn's text, so it is what follows the
sampled tokens, up to the rest of the turn (``}</tool_call>``) that was sampled too: the glue starts after
the close token. A third render, with sentinels for the new messages as well, shows where their text goes:
that tells the template's own text from environment text, and a dropped message from a kept one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from fsm_rollout.chat.markers import Encoded, Injection, Marker, MarkerEncoder, Part
from fsm_rollout.chat.messages import Texts, texts_of, with_texts
from fsm_rollout.chat.render import Renderer, Tools
from fsm_rollout.chat.turn_ends import Closes, common_prefix
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import text_of

Transform = Callable[[str], str]


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# How templates write a message's text. The order matters only where two give the same result.
TRANSFORMS: tuple[Transform, ...] = (
    str,
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
ORDERS = frozenset({"system", "developer"})  # roles of the author's instructions: no slots, but not to be lost either
UNMISTAKABLE = 32  # text this long that is found in a render does not stand there by chance


@dataclass(frozen=True, slots=True)
class Slot:
    """Where text number ``index`` goes, and how the template writes it; it may be a message's, or the id of a call."""

    index: int
    transform: Transform
    is_message: bool = True


Pieces = Sequence[str | Slot]  # text of the template, and slots for text of messages


def filled(
    pieces: Pieces, texts: Sequence[str], authored: Container[int] = (), owners: Sequence[int] | None = None
) -> list[Part]:
    """Return the pieces with text in the slots: the environment's, but for the ``authored`` texts.

    ``owners`` are the messages of the texts; without it each message has one.
    """
    parts: list[Part] = []
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(Part(piece))
        else:
            message = (owners[piece.index] if owners else piece.index) if piece.is_message else None
            parts.append(Part(piece.transform(texts[piece.index]), piece.index not in authored, message))
    return parts


@dataclass(frozen=True, slots=True)
class Step:
    """An assistant turn between what was before it and what follows, as the template sees them.

    ``sampled`` is the stop token that the turn ended in; None if it was cut.
    """

    base: list[Message]
    turn: Message
    new: list[Message]
    tools: Tools | None
    sampled: int | None
    now: datetime

    @property
    def texts(self) -> Texts:
        """What the new messages say."""
        return texts_of(self.new)


@dataclass(frozen=True, slots=True)
class Glue:
    """What stands between two generations: the close token, then the template's text and the messages' (``parts``).

    ``opener`` says that the close token is the header of the next message too, ``close_sampled`` that the turn ended in
    a token that stands for it.
    """

    close: Marker
    opener: bool
    close_sampled: bool
    parts: tuple[Part, ...] = field(compare=False)
    text: str  # what follows the close token

    def encode(self, encoder: MarkerEncoder, injection: Injection) -> Encoded:
        """Encode the glue as it stands after the close token, and drop that token where it was sampled.

        Encoded together, since white space beside a token may belong to it (``rstrip``).
        """
        encoded = encoder.encode_parts([Part(self.close.text), *self.parts], injection)
        if not encoded.ids or encoded.ids[0] != self.close.id:
            raise ChatTemplateError("no-close-token", f"{self.close.text!r} is not encoded as one token")
        return encoded.after(1) if self.close_sampled else encoded


def draw_word() -> str:
    """Draw the unguessable word that sentinels begin with.

    Those of the last turn end in ``x`` and ``y``, so that no common suffix reaches into them; that of a message is its
    ``{index}m``. None is the start of another.
    """
    return f"zq{secrets.token_hex(12)}"


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
    content = text_of(message)
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
    return json.dumps(_marked(parsed, sentinel)) if isinstance(parsed, dict) else sentinel


@dataclass(frozen=True, slots=True)
class Deriver:
    """Derives glue for one template. ``configured_stops`` are those that tokenizer, config and caller name."""

    renderer: Renderer
    encoder: MarkerEncoder
    configured_stops: frozenset[int]
    closes: Closes

    def derive(self, step: Step) -> Glue:
        """Return the glue between the step's turn and the next generation; ChatTemplateError names a broken rule."""
        # 1. What follows the turn, whatever it says; and where the new messages stand in it.
        word = draw_word()
        marked_turn, suffix = self._common_suffix(step, word)
        pattern = self._pattern(step, marked_turn, word)
        # 2. The close: what ends the turn before the first new message.
        region = str(pattern[0])
        close_at, close = self._close(region, step.sampled)
        cut = close_at + len(close.text)
        if not suffix.startswith(region[:cut]):
            raise ChatTemplateError(
                "text-moved", "what stands between the turn and its close token depends on the next message's text"
            )
        # 3. The same must stand after the turn's own text.
        text = suffix[cut:]
        rendered = self.renderer.render([*step.base, step.turn, *step.new], step.tools, step.now)
        if not rendered.endswith(close.text + text):
            raise ChatTemplateError(
                "text-moved", "the text after the turn is not the same once the turn's own text stands in it"
            )
        # 4. The template's text told from the messages'.
        texts, owners = step.texts
        parts = told_apart([region[cut:], *pattern[1:]], texts, range(len(texts)), text, owners)
        # 5. A turn that stopped on another stop token needs no close, unless that is the next message's header too.
        opener, sampled = close.id in self.closes.openers, step.sampled
        close_sampled = sampled == close.id
        if sampled is not None and not close_sampled and not opener:
            close_sampled = sampled in self.configured_stops | self.closes.ids or self.encoder.by_id[sampled].special
        return Glue(close, opener, close_sampled, tuple(parts), text)

    def _close(self, region: str, sampled: int | None) -> tuple[int, Marker]:
        """Return the close token in what stands before the next message, and its place."""
        closes, markers = self.closes, self.encoder.find(region)
        if sampled is None:
            preference = [self.configured_stops, closes.ids - closes.openers, closes.openers]
        else:
            text = frozenset({closes.text.id} if closes.text else ())
            preference = [frozenset({sampled}), self.configured_stops, text - closes.openers, closes.openers]
        ids = [marker.id for _, marker in markers]
        chosen = next((at for preferred in preference for at, id_ in enumerate(ids) if id_ in preferred), None)
        if chosen is None:
            raise ChatTemplateError(
                "no-close-token",
                f"the template writes no known stop token after an assistant turn, only {region[:80]!r}; "
                "without one the end of the turn and the next message cannot be told apart",
            )
        while sampled is None and chosen:  # a turn that was cut lacks the markers too that come right before its stop
            position, marker = markers[chosen - 1]
            if ids[chosen - 1] not in closes.lead or position + len(marker.text) != markers[chosen][0]:
                break
            chosen -= 1
        return markers[chosen]

    def _common_suffix(self, step: Step, word: str) -> tuple[Message, str]:
        """Return the marked turn that worked, and what both renders have in common after the sentinel."""
        failure: ChatTemplateError | None = None
        for turns in zip(marked_turns(step.turn, f"{word}x"), marked_turns(step.turn, f"{word}y"), strict=True):
            try:
                first, second = (
                    self.renderer.render([*step.base, turn, *step.new], step.tools, step.now) for turn in turns
                )
            except ChatTemplateError as error:
                failure = failure or error
                continue
            if f"{word}x" in first and f"{word}y" in second:
                tail, other = first.rpartition(f"{word}x")[2], second.rpartition(f"{word}y")[2]
                return turns[0], tail if tail == other else common_prefix(tail[::-1], other[::-1])[::-1]
        raise failure or ChatTemplateError(
            "turn-dropped", "the template writes neither the text nor the calls of the last turn"
        )

    def _pattern(self, step: Step, marked_turn: Message, word: str) -> list[str | int]:
        """Return what follows the turn when the new messages are sentinels: text, and numbers of texts."""
        owners = step.texts.owners
        new = marked(step.new, range(len(owners)), word)
        rendered = self.renderer.render([*step.base, marked_turn, *new], step.tools, step.now)
        pattern = _cut(rendered.rpartition(f"{word}x")[2], word)
        for number, index in enumerate(owners):
            if number in pattern:
                continue
            if f"{word}{number}m" in rendered:
                raise ChatTemplateError(
                    "text-moved", f"the template writes new message {index} before the text of the turn it follows"
                )
            role = step.new[index]["role"]
            raise ChatTemplateError("message-dropped", f"the template silently drops the new {role!r} message {index}")
        return pattern

    def prompt_parts(
        self, messages: list[Message], authors: Container[str], tools: Tools | None, now: datetime, text: str
    ) -> list[Part]:
        """Return ``text``, the render of ``messages``, with the text of other roles than the ``authors``' told apart.

        Raises:
            ChatTemplateError: ``message-dropped`` or ``message-altered``.

        """
        word = draw_word()
        contents, owners = texts_of(messages)
        foreign = [number for number, owner in enumerate(owners) if messages[owner]["role"] not in authors]
        authored = set(range(len(owners))).difference(foreign)
        # 1. Where each message's text stands. Sentinels may change what is written beside them, and a template may take
        #    an assistant's turn apart: what they show is taken only if it fits the real text.
        #    Nor is it told what a template does that skips a message which says nothing.
        for said in (contents, [content.strip() for content in contents]):
            written = [number for number, content in enumerate(said) if content]
            pattern = self._shown(messages, written, tools, now, word)
            if set(written).issubset(pattern):
                pieces = fit(pattern, contents, text)
                if pieces is not None:
                    return filled(pieces, contents, authored, owners)
        # 2. No system or developer message may be lost. A template may move its text (into the first user message) or
        #    take flags out of it, so what is looked for is a sentinel behind the text, anywhere.
        for number, index in enumerate(owners):
            order = contents[number].strip()
            if messages[index]["role"] not in ORDERS or not order or (len(order) >= UNMISTAKABLE and order in text):
                continue
            ordered = with_texts(messages, {number: f"{order} {word}"})
            try:
                is_kept = word in self.renderer.render(ordered, tools, now)
            except ChatTemplateError:  # it insists on what is said there
                is_kept = order in text
            if not is_kept:
                raise _dropped(messages, index)
        # 3. Nor may a foreign one; where it stands, its text is told from the template's.
        pattern = self._shown(messages, foreign, tools, now, word)
        for number in foreign:
            if pattern and number not in pattern and contents[number]:
                raise _dropped(messages, owners[number])
        return told_apart(pattern, contents, foreign, text, owners)

    def _shown(
        self, messages: list[Message], indices: Sequence[int], tools: Tools | None, now: datetime, word: str
    ) -> list[str | int]:
        """Return the render with sentinels in the messages at the indices; empty if the template insists on a text."""
        try:
            return _cut(self.renderer.render(marked(messages, indices, word), tools, now), word)
        except ChatTemplateError:
            return []


def _dropped(messages: Sequence[Message], index: int) -> ChatTemplateError:
    return ChatTemplateError(
        "message-dropped", f"the template silently drops the {messages[index]['role']!r} message {index}"
    )


def marked(messages: Sequence[Message], numbers: Iterable[int], word: str) -> list[Message]:
    """Return the messages with sentinels instead of the texts of these numbers."""
    return with_texts(messages, {number: f"{word}{number}m" for number in numbers})


def _cut(text: str, word: str) -> list[str | int]:
    """Split ``text`` at the sentinels ``{word}{index}m``; each stands there as its index."""
    first, *rest = text.split(word)
    pattern: list[str | int] = [first]
    for piece in rest:
        index, _, after = piece.partition("m")
        pattern += [int(index), after]
    return pattern


def fit(pattern: Sequence[str | int], texts: Sequence[str], rendered: str) -> Pieces | None:
    """Find how each slot of ``pattern`` writes its text such that all of it is ``whole``; None if no way fits."""

    def ways(index: int, position: int) -> Iterator[tuple[str | Slot, int]]:
        """Yield what the item may be if it stands at the position, and where it ends."""
        item, tried = pattern[index], set[str]()
        for option in (item,) if isinstance(item, str) else [Slot(item, transform) for transform in TRANSFORMS]:
            form = option if isinstance(option, str) else option.transform(texts[option.index])
            if form not in tried and rendered.startswith(form, position):
                tried.add(form)
                yield option, position + len(form)

    # Depth first, but not by recursion: a conversation may be long.
    pieces: list[str | Slot] = []
    open_ways = [ways(0, 0)] if pattern else []
    while open_ways:
        piece, position = next(open_ways[-1], (None, 0))
        if piece is None:
            open_ways.pop()
            del pieces[-1:]
        elif len(open_ways) < len(pattern):
            pieces.append(piece)
            open_ways.append(ways(len(pieces), position))
        elif position == len(rendered):
            return [*pieces, piece]
    return None


def told_apart(
    pattern: Sequence[str | int], texts: Sequence[str], foreign: Iterable[int], rendered: str, owners: Sequence[int]
) -> list[Part]:
    """Return ``rendered`` in parts: by its pattern or, where that fits in no way, by looking for the texts in order.

    Raises:
        ChatTemplateError: ``message-altered`` when a foreign text is not there in any known form.

    """
    pieces = fit(pattern, texts, rendered)
    if pieces is not None:
        return filled(pieces, texts, (), owners)
    parts: list[Part] = []
    start = 0
    for number, index in enumerate(foreign):
        forms = (transform(texts[index]) for transform in TRANSFORMS)
        at, form = next(((at, form) for form in forms if (at := rendered.find(form, start)) >= 0), (-1, ""))
        if at < 0:
            raise ChatTemplateError("message-altered", f"the template rewrites the text of new message {number}")
        parts += [Part(rendered[start:at]), Part(form, environment=True, message=owners[index])]
        start = at + len(form)
    return [*parts, Part(rendered[start:])]
