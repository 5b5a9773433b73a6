"""Glue and prompts without a render: templates of glue, learned from the reference and checked by probes.

Invariant: an answer given here is the one the reference gave, or would give, and what :meth:`GlueTemplate.encode` gives
is what encoding the filled text in one go gives, with the same parts. A template is learned for a *shape* (the roles,
keys, names and kinds of the last turn and the new messages) as :mod:`fsm_rollout.chat.glue_learning` says, and it is
used only with tools and role orders for which it has given the reference's answer. What is unusual (odd messages, text
that the chat template itself looks for) has no shape and is rendered in full. After :meth:`GlueCache.distrust` nothing
is answered here again.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from fsm_rollout.chat.derive import Pieces, filled
from fsm_rollout.chat.markers import CacheEntry, Encoded, Injection, MarkerEncoder, Part, Place, parts_at, places_of
from fsm_rollout.chat.messages import Messages, made_id, shows_pictures, texts_and_form
from fsm_rollout.chat.reference import Reference
from fsm_rollout.chat.render import Tools
from fsm_rollout.trajectory.stream import only_text_of, text_of
from fsm_rollout.trajectory.tokens import Ids, MessagePart, as_ids

if TYPE_CHECKING:
    from jinja2 import nodes

# What the cache keeps: so many of a kind, and turns of about so many characters. Then it begins anew.
MOST_ENTRIES = 4096
MOST_CHARACTERS = 2**24
SHORT = 2_000  # texts of up to so many characters are remembered with their ids: what tools answer is often the same
MESSAGE_CHARACTERS = 256  # what a turn counts besides its text
MOST_OPENING = 8  # messages of a prompt that has a shape: coding agents begin with two of the system's and two users'

_TEXT_METHODS = frozenset({"startswith", "endswith", "split", "rsplit", "replace", "find", "rfind", "index", "count"})
_TEXT_METHODS |= {"partition", "rpartition", "removeprefix", "removesuffix"}
_TURN_KEYS = frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"})
_PROMPT_KEYS = frozenset({"role", "content"})
_OPENING_ROLES = frozenset({"system", "user"})
_NEW_KEYS = frozenset({"role", "content", "name", "tool_call_id"})


class Shape(NamedTuple):
    """A question without its text. ``general`` leaves out the tools and the order of roles before it."""

    key: Hashable
    general: Hashable
    # What fills the slots: each message's text (or each of its texts, where pictures stand between them), then each
    # one's tool call id.
    texts: list[str]


class GlueTemplate(CacheEntry):
    """Text of the chat template with slots for messages' text; what lies before and behind the slots is encoded once.

    Only what lies between the nearest markers (``_middle``) is encoded each time, if that is seen to make no difference
    on ``probes``: SentencePiece-like tokenizers, whose first word is special, fail, and their templates save the render
    only. Where it holds other markers than the chat template's (``_markers``), all is encoded the long way, through
    :meth:`MarkerEncoder.encode_parts`.

    ``owners`` are the messages that the first texts are of, ``fixed`` is where text of further messages stands in the
    first piece. The first ``dropped`` ids are encoded with the rest, but are not part of the result: the close token
    that was sampled already.
    """

    def __init__(
        self,
        pieces: Pieces,
        encoder: MarkerEncoder,
        injection: Injection,
        probes: Sequence[Sequence[str]],
        owners: Sequence[int],
        fixed: Sequence[Place] = (),
        dropped: int = 0,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._injection: Injection = injection
        self._dropped = dropped
        self._fast = False
        # The ids of short middles that came before, and their parts in the whole.
        self._known: dict[str, tuple[Ids, tuple[MessagePart, ...]]] = {}
        self.pieces = pieces
        self._owners = owners
        first, last = str(pieces[0]), str(pieces[-1])
        self._first = list(_cut_at(first, fixed))
        whole = [self.encode(probe) for probe in probes]
        start, end = encoder.cut(first)[-1][0], encoder.cut(last)[0][0]
        head = encoder.encode(first.removesuffix(start))
        self._head, self._tail = as_ids(head.ids)[dropped:], as_ids(encoder.encode(last.removeprefix(end)).ids)
        self._head_parts = tuple([part.moved(-dropped) for part in parts_at(fixed, len(head), head.token_to_chars)])
        self._middle: Pieces = [start, *pieces[1:-1], end]
        self._markers = [m.id for piece in self._middle if isinstance(piece, str) for _, m in encoder.find(piece)]
        self._fast = not encoder.overlapping
        self._fast &= [self.encode(probe) for probe in probes] == whole

    def text(self, texts: Sequence[str]) -> str:
        """Return the text with its slots filled."""
        return "".join([part.text for part in filled(self.pieces, texts)])

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids, whose they are, and how many injected markers were neutralised."""
        if self._fast:
            middle = ""
            for piece in self._middle:
                middle += piece if isinstance(piece, str) else piece.transform(texts[piece.index])
            known = self._known.get(middle)
            if known is None:
                encoding = self._encoder.encode(middle)
                if self._encoder.markers_of(encoding.ids) == self._markers:
                    places = places_of(filled(self._middle, texts, (), self._owners))
                    parts = parts_at(places, len(encoding), encoding.token_to_chars)
                    known = as_ids(encoding.ids), (*self._head_parts, *(part.moved(len(self._head)) for part in parts))
                    if len(middle) <= SHORT:
                        if len(self._known) >= MOST_ENTRIES:
                            self._known.clear()
                        self._known[middle] = known
            if known is not None:
                ids, message_parts = known
                return Encoded(self._head + ids + self._tail, parts=message_parts, entry=self)
        filled_parts = [*self._first, *filled(self.pieces[1:], texts, (), self._owners)]
        encoded = self._encoder.encode_parts(filled_parts, self._injection).after(self._dropped)
        encoded.entry = self
        return encoded


def _cut_at(text: str, places: Sequence[Place]) -> Iterator[Part]:
    """Yield a text of the template with messages at the places."""
    at = 0
    for message, start, end, _ in places:
        yield Part(text[at:start])
        yield Part(text[start:end], message=message)
        at = end
    yield Part(text[at:])


class GlueCache:
    """What was learned of one chat template; bounded, shared by all trajectories."""

    def __init__(self, reference: Reference) -> None:
        self._renderer = reference.deriver.renderer
        self._tested, self._compared = tested_texts(self._renderer.trees())
        self._sees = reference.reader is not None
        self._distrusted = False
        self._forget()

    def _forget(self) -> None:
        self.histories = Histories(self._sees)
        # By shape (with tools and order, and without) and by prompt key. None: only the reference can serve it.
        self.templates: dict[Hashable, GlueTemplate | None] = {}
        self._tools: dict[tuple[int, ...], tuple[bytes, tuple[object, ...]]] = {}

    def distrust(self) -> None:
        """Give no answer from here on."""
        self._distrusted = True
        self._forget()

    def _may_matter(self, texts: Sequence[str]) -> bool:
        """Return whether the chat template may treat one of the texts unlike others."""
        for text in texts:  # noqa: SIM110  # a generator costs more than the searches
            if text in self._compared or any(map(text.__contains__, self._tested)):
                return True
        return False

    def _tools_digest(self, tools: Tools | None) -> bytes | None:
        """Return what is equal for equal schemas; raise ValueError if they hold what is not plain data.

        They are known by identity, so the cost does not grow with what they say, and kept alive, so that an identity
        is not taken over.
        """
        if not tools:
            return None
        identity = tuple(map(id, tools)) if type(tools) is not tuple else (id(tools),)
        if identity not in self._tools:
            self.make_room()
            self._tools[identity] = marshal.dumps(list(tools), 2), tuple(tools)  # of a tuple, this is the same object
        return self._tools[identity][0]

    def make_room(self) -> None:
        """Begin anew where there is no room for one more."""
        if max(len(self.templates), len(self._tools)) >= MOST_ENTRIES:
            self._forget()

    # --- glue

    def shape(
        self, history: Messages, new_messages: Messages, tools: Tools | None, sampled: int | None
    ) -> Shape | None:
        """Return the shape of a step, in time that does not grow with a known history; None for what is unusual."""
        if self._distrusted or not isinstance(history, (list, tuple)) or not isinstance(new_messages, (list, tuple)):
            return None
        try:
            turn, position = history[-1], len(history) - 1
            # Read here and not by conform, which takes twice as long.
            if turn["role"] != "assistant" or not turn.keys() <= _TURN_KEYS or not new_messages:
                return None
            # 1. The turn: its keys, whether it says anything, the names of its calls.
            key: list[Hashable] = [sampled, tuple(turn), bool(only_text_of(turn))]
            call_ids: list[str] = []
            for number, call in enumerate(turn.get("tool_calls") or ()):
                function = call["function"]
                arguments, name, id_ = function["arguments"], function["name"], call.get("id")
                if type(arguments) is str:
                    arguments = json.loads(arguments)
                if type(arguments) is not dict or type(name) is not str or len(call) > 3 or len(function) > 2:
                    return None
                call_ids.append(id_ or made_id(position, number))
                key.append(name)
            # 2. The new messages: roles, keys, names, whether they say anything, how long their ids are.
            open_ids = call_ids.copy()
            ids: list[str] = []
            contents: list[str] = []
            for index, message in enumerate(new_messages, position + 1):
                texts, form = texts_and_form(message, self._sees)
                contents += texts
                role = message["role"]
                name, id_ = message.get("name"), message.get("tool_call_id")
                if type(role) is not str or not (name is None or type(name) is str):
                    return None
                if role == "assistant" or any(map(str.isspace, texts)) or not message.keys() <= _NEW_KEYS:
                    return None
                if role != "tool" and id_ is not None:
                    return None
                if role == "tool" and id_ is None:
                    id_ = open_ids.pop(0) if open_ids else made_id(index, 0)
                elif id_ in open_ids:
                    open_ids.remove(id_)
                ids.append(id_ or "")
                key.append((role, tuple(message), name, form, len(ids[-1])))
            # 3. Which ids are the same.
            every_id = call_ids + ids
            key.append(tuple([every_id.index(id_) for id_ in every_id]))
            for id_ in every_id:
                if type(id_) is not str or (id_ and not id_.isalnum()):
                    return None
            if self._may_matter(contents):
                return None
            general = tuple(key)
            return Shape((general, self._tools_digest(tools), self.histories.pairs(history)), general, contents + ids)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError):
            return None

    # --- prompts

    def prompt_shape(self, messages: Messages, tools: Tools | None, now: datetime) -> Shape | None:
        """Return the shape of prompts that differ in their last message's text; None for all but the plain ones."""
        if self._distrusted or not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= MOST_OPENING:
            return None
        try:
            texts = list(map(only_text_of, messages))
            roles = list(map(itemgetter("role"), messages))
            digest = self._tools_digest(tools) if tools else None
        except (KeyError, TypeError, AttributeError, ValueError):
            return None
        if roles[-1] != "user" or not _OPENING_ROLES.issuperset(roles) or {*map(frozenset, messages)} != {_PROMPT_KEYS}:
            return None
        if not texts[-1].strip() or self._may_matter(texts[-1:]):
            return None
        key = digest, tuple(roles), tuple(texts[:-1]), now if self._renderer.uses_clock else None
        return Shape(key, key, texts)


# --- what decides whether the reference would answer the same

Pairs = frozenset[tuple[str, str]]


class Histories:
    """Which roles have followed which in a history: what chat templates that insist on an order look at.

    Invariant: equal to a scan of the whole history, but a history that goes on from one seen before costs only its
    new messages. Histories are recognised by the identity of their assistant turns, which are kept alive here.
    """

    def __init__(self, sees: bool) -> None:
        self._sees = sees  # whether the model sees pictures
        self._seen: dict[tuple[int, int], tuple[Mapping[str, object], Pairs]] = {}
        self._characters = 0

    def pairs(self, history: Messages) -> Pairs:
        """Return the set of (role, next role) in ``history``, a turn with one call told from one with several.

        Raises:
            KeyError, TypeError, AttributeError: for messages that are not OpenAI-style.

        """
        last = len(history) - 1
        start, known_pairs = 0, Pairs()
        turns = 0
        for at in range(last, -1, -1):
            if history[at]["role"] == "assistant":
                turns += 1
                if entry := self._seen.get((id(history[at]), at)):
                    start, known_pairs = at + 1, entry[1]
                    break
                if turns == 2:  # if the last two are unknown, so are all before them
                    break
        if start > last:
            return known_pairs
        texts = list(map(text_of, history[start:]))
        kinds = [_kind(message, self._sees) for message in history[max(0, start - 1) :]]
        new_pairs = tuple(pairwise(kinds if start else ["", *kinds]))
        pairs = known_pairs if known_pairs.issuperset(new_pairs) else known_pairs.union(new_pairs)
        self._characters += MESSAGE_CHARACTERS + len(texts[-1])
        if self._characters > MOST_CHARACTERS or len(self._seen) > MOST_ENTRIES:
            self._seen.clear()  # conversations under way are then scanned once more
            self._characters = 0
        self._seen[id(history[-1]), last] = history[-1], pairs
        return pairs


def _kind(message: Mapping[str, Any], sees: bool) -> str:
    role = message["role"]
    if type(role) is not str:
        raise TypeError("so is this")
    if shows_pictures(message, sees):
        role += "*"
    calls = message.get("tool_calls")
    if not calls:
        return role
    for call in calls:
        if type(call["function"]["name"]) is not str:
            raise TypeError("and this")
    return f"{role}{min(len(calls), 2)}"


def tested_texts(trees: Sequence[nodes.Template]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return what a chat template looks for in texts, and what it compares whole texts with.

    If a message's text holds none of the first and is none of the second, the template's own string tests (``in``,
    ``startswith``, ``split``, …) cannot tell it from any other ordinary text. Tests written in ways not seen here are
    what the audit is for; white space is left to the probes, since every text has some.
    """
    from jinja2 import nodes

    inside: set[str] = set()
    whole: set[str] = set()
    assigned: dict[str, set[str]] = {}

    def literals(node: nodes.Node) -> set[str]:
        """Return the strings that an expression may be: a literal, a name for one, a choice of several."""
        if isinstance(node, nodes.Name):
            return assigned.get(node.name, set())
        if isinstance(node, (nodes.List, nodes.Tuple, nodes.CondExpr)):
            return set().union(*map(literals, node.iter_child_nodes(exclude=("test",))))
        return {node.value} if isinstance(node, nodes.Const) and isinstance(node.value, str) else set()

    for assign in chain.from_iterable(tree.find_all(nodes.Assign) for tree in trees):
        if isinstance(assign.target, nodes.Name):
            assigned[assign.target.name] = literals(assign.target) | literals(assign.node)
    for compare in chain.from_iterable(tree.find_all(nodes.Compare) for tree in trees):
        for operand in compare.ops:
            (inside if operand.op in ("in", "notin") else whole).update(literals(compare.expr))
            whole.update(literals(operand.expr))
    for call in chain.from_iterable(tree.find_all(nodes.Call) for tree in trees):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
            inside.update(*map(literals, call.args))
    for applied in chain.from_iterable(tree.find_all(nodes.Filter) for tree in trees):
        if applied.name in _TEXT_METHODS:
            inside.update(*map(literals, applied.args))
    return tuple(sorted(text for text in inside if text.strip())), frozenset(whole)
