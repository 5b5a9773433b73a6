"""Glue and prompts without a render: templates of glue, learned from the reference and checked by probes.

Invariant: an answer given here is the one the reference gave, or would give. A :class:`GlueTemplate` is learned for a
*shape* (the roles, keys, names and kinds of the last turn and the new messages) only if the reference gives the same
glue after ten unlike histories and the real one, and it is used only with tools, and after an order of roles, for which
it has given the reference's answer. What is unusual (odd messages, text that the chat template itself looks for) has
no shape and is rendered in full; so is every shape of a template that keeps state over the conversation (DeepSeek,
Command-R): no name is listed. After :meth:`GlueCache.distrust` nothing is answered here again.
"""

from __future__ import annotations

import json
import marshal
import secrets
import string
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from fsm_rollout.chat.closes import probe_call, probe_result
from fsm_rollout.chat.derive import Deriver, Glue, Pieces, Sentinels, Slot, Step, filled, fit
from fsm_rollout.chat.markers import CacheEntry, Encoded, Injection, MarkerEncoder
from fsm_rollout.chat.messages import Dialect, Messages, made_id
from fsm_rollout.chat.render import Tools
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message

if TYPE_CHECKING:
    from jinja2 import nodes

BEFORE, AFTER = "\n \t", ' "q\\ \n\né\' <b>& {"a": [1]}  \n\n'
"""White space, quotes and escapes around a probe's word: they tell a trimmed slot from a JSON-encoded one."""
MOST_ENTRIES = 4096
MOST_CHARACTERS = 2**24
"""What the cache keeps: so many entries of a kind, and turns of about so many characters. Then it begins anew."""

_TEXT_METHODS = frozenset({"startswith", "endswith", "split", "rsplit", "replace", "find", "rfind", "index", "count"})
_TEXT_METHODS |= {"partition", "rpartition", "removeprefix", "removesuffix"}
_TURN_KEYS = frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"})
_NEW_KEYS = frozenset({"role", "content", "name", "tool_call_id"})


# --- a learned template ------------------------------------------------------------------------------------------


class GlueTemplate(CacheEntry):
    """Text of the chat template with slots for messages' text; what is fixed between two slots is encoded once.

    Text between two markers is encoded on its own only if that is seen to make no difference on ``probes``:
    SentencePiece-like tokenizers, whose first word is special, fail, and their templates save the render only. A slot
    whose text turns out to hold a marker goes the long way, through :meth:`MarkerEncoder.encode_parts`.

    The first ``dropped`` ids are encoded with the rest, but are not part of the result: the close token that was
    sampled already.
    """

    __slots__ = ("_encoder", "_injection", "dropped", "pieces", "steps")

    def __init__(
        self,
        pieces: Pieces,
        encoder: MarkerEncoder,
        injection: Injection,
        probes: Sequence[Sequence[str]],
        dropped: int = 0,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._injection = injection
        self.pieces = pieces
        self.dropped = dropped
        self.steps: list[list[int] | tuple[str | Slot, ...]] = []
        """Ids, and what lies between two markers and holds a slot; none if all is to be encoded together."""
        if injection == "allow":
            return
        whole = [self.encode(probe) for probe in probes]
        self.steps = _encoded_where_fixed(pieces, encoder)
        first = self.steps[0]
        if dropped and isinstance(first, list):
            self.steps[0] = first[dropped:]
        if (dropped and len(first) < dropped) or [self.encode(probe) for probe in probes] != whole:
            self.steps = []

    def text(self, texts: Sequence[str]) -> str:
        """Return the text with its slots filled."""
        return "".join([part.text for part in filled(self.pieces, texts)])

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids, and how many injected markers were neutralised."""
        ids: list[int] = []
        for step in self.steps:
            if isinstance(step, list):
                ids += step
                continue
            found = self._encoder.encode(
                "".join([piece if isinstance(piece, str) else piece.fill(texts) for piece in step])
            )
            if not self._encoder.ids.isdisjoint(found):
                break
            ids += found
        else:
            if self.steps:
                return Encoded(ids, entry=self)
        encoded = self._encoder.encode_parts(filled(self.pieces, texts), self._injection).after(self.dropped)
        encoded.entry = self
        return encoded


def _encoded_where_fixed(pieces: Pieces, encoder: MarkerEncoder) -> list[list[int] | tuple[str | Slot, ...]]:
    """Cut the pieces at every marker; encode what lies between two of them and has no slot."""
    between: list[list[str | Slot]] = [[]]
    markers: list[list[int]] = []
    for piece in pieces:
        if isinstance(piece, Slot):
            between[-1].append(piece)
            continue
        start = 0
        for position, marker in encoder.find(piece):
            between[-1].append(piece[start:position])
            markers.append([marker.id])
            between.append([])
            start = position + len(marker.text)
        between[-1].append(piece[start:])
    steps: list[list[int] | tuple[str | Slot, ...]] = []
    for run, marker_id in zip(between, [*markers, []], strict=True):
        if any(isinstance(piece, Slot) for piece in run):
            steps += [tuple(run), marker_id]
            continue
        ids = encoder.encode("".join(map(str, run))) + marker_id
        if steps and isinstance(steps[-1], list):
            steps[-1] += ids
        else:
            steps.append(ids)
    return steps


# --- the cache ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A step without its text. ``general`` leaves out the tools and the order of roles before it."""

    key: Hashable
    general: Hashable
    texts: list[str]
    """What fills the slots: each new message's content, then each one's tool call id."""
    contents: list[str]


class GlueCache:
    """What was learned of one chat template; bounded, shared by all trajectories."""

    def __init__(self, deriver: Deriver, dialect: Dialect, injection: Injection) -> None:
        self._deriver = deriver
        self._dialect = dialect
        self._injection: Injection = injection
        self._tested = TestedText(deriver.renderer.trees())
        self._distrusted = False
        self._forget()

    def _forget(self) -> None:
        self.histories = Histories()
        # None: only the reference can serve it.
        self.glues: dict[Hashable, GlueTemplate | None] = {}
        self.prompts: dict[Hashable, GlueTemplate | None] = {}
        self._by_shape: dict[Hashable, GlueTemplate | None] = {}
        self._tools: dict[tuple[int, ...], tuple[int, tuple[object, ...]]] = {}
        self._digests: dict[Hashable, int] = {}

    def distrust(self) -> None:
        """Give no answer from here on."""
        self._distrusted = True
        self._forget()

    def _make_room(self) -> None:
        """Begin anew when there is too much; all at once, since shapes hold numbers of tools."""
        if max(len(self.glues), len(self.prompts), len(self._by_shape), len(self._tools)) >= MOST_ENTRIES:
            self._forget()

    # --- glue

    def shape(
        self, history: Messages, new_messages: Messages, tools: Tools | None, sampled: int | None
    ) -> Shape | None:
        """Return the shape of a step, in time that does not grow with a known history; None for what is unusual."""
        if self._distrusted:
            return None
        try:
            turn = history[-1]
            content = turn["content"]
            if turn["role"] != "assistant" or not turn.keys() <= _TURN_KEYS or len(new_messages) == 0:
                return None
            if content is not None and type(content) is not str:
                return None
            # 1. The turn: its keys, whether it says anything, the names of its calls.
            position = len(history) - 1
            key: list[Hashable] = [sampled, tuple(turn), bool(content)]
            call_ids: list[str] = []
            for number, call in enumerate(turn.get("tool_calls") or ()):
                function = call["function"]
                arguments, name, id_ = function["arguments"], function["name"], call.get("id")
                if type(arguments) is str:
                    arguments = json.loads(arguments)
                if type(arguments) is not dict or len(call) > 3 or len(function) > 2:
                    return None
                if type(name) is not str or not (id_ is None or type(id_) is str):
                    return None
                call_ids.append(id_ or made_id(position, number))
                key.append(name)
            # 2. The new messages: roles, keys, names, whether they say anything, how long their ids are.
            open_ids = call_ids.copy()
            contents: list[str] = []
            ids: list[str] = []
            for index, message in enumerate(new_messages, position + 1):
                role, content = message["role"], message["content"]
                name, id_ = message.get("name"), message.get("tool_call_id")
                if type(content) is not str or type(role) is not str or not (name is None or type(name) is str):
                    return None
                if role == "assistant" or (content and content.isspace()) or not message.keys() <= _NEW_KEYS:
                    return None
                if role == "tool":
                    if id_ is None:
                        id_ = open_ids.pop(0) if open_ids else made_id(index, 0)
                    elif id_ in open_ids:
                        open_ids.remove(id_)
                    if not id_.isalnum():
                        return None
                elif id_ is not None:
                    return None
                contents.append(content)
                ids.append(id_ or "")
                key.append((role, tuple(message), name, bool(content), len(id_ or "")))
            # 3. Which ids are the same.
            every_id = call_ids + ids
            key.append(tuple([every_id.index(id_) for id_ in every_id]))
            general = tuple(key)
            hash(general)
            whole = (general, self._tools_number(tools), self.histories.pairs(history))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError):
            return None
        return Shape(whole, general, contents + ids, contents)

    def glue(self, shape: Shape) -> Encoded | None:
        """Return the glue, if a template was learned and the text is like any other to the chat template."""
        template = self.glues.get(shape.key)
        if template is None or self._tested.may_matter(shape.contents):
            return None
        return template.encode(shape.texts)

    def serves(self, shape: Shape) -> bool:
        """Return whether :meth:`glue` would answer."""
        return self.glues.get(shape.key) is not None and not self._tested.may_matter(shape.contents)

    def learn(self, shape: Shape, step: Step, glue: Glue, result: Encoded, *, close_sampled: bool) -> None:
        """Learn from a step that the reference answered, for the next one of its shape.

        A template learned with other tools or after another order of roles is taken over if it gives what the
        reference gives.
        """
        if shape.key in self.glues or self._tested.may_matter(shape.contents):
            return  # served by the reference for good; or wait for text that the chat template does not look at
        self._make_room()
        template = self._by_shape.get(shape.general)
        if template is None or template.text(shape.texts) != glue.close.text + glue.text:
            template = self._learned(step, glue, dropped=int(close_sampled))
            if template is not None and template.encode(shape.texts) != result:
                template = None
            self._by_shape[shape.general] = template
        self.glues[shape.key] = template

    def _learned(self, step: Step, glue: Glue, dropped: int) -> GlueTemplate | None:
        """Return a template for all glue of this shape, or None if there is none that can be trusted."""
        # 1. Unguessable words for text and ids; as they are, and with white space and quotes around them.
        words = Sentinels.draw()
        named = _with_other_ids(step)
        plain = replace(named, new=_saying(named.new, words, "", ""))
        decorated = replace(named, new=_saying(named.new, words, BEFORE, AFTER))
        # 2. The glue must be the same after every history, whatever the turn said, and whenever.
        same = self._same_everywhere(plain)
        if same is None or (same.close, same.opener) != (glue.close, glue.opener):
            return None
        try:
            dressed = self._deriver.derive(decorated)
        except ChatTemplateError:
            return None
        if (dressed.close, dressed.opener) != (glue.close, glue.opener):
            return None
        # 3. How the words entered it says how text will.
        pieces = fit(_split(same.text, _texts(plain)), _texts(decorated), dressed.text)
        if pieces is None:
            return None
        probes = [_texts(step), _texts(plain), _texts(decorated), [f" {text}" for text in _texts(plain)]]
        pieces = [glue.close.text, *pieces]
        template = GlueTemplate(pieces, self._deriver.encoder, self._injection, probes, dropped)
        return template if template.text(_texts(step)) == glue.close.text + glue.text else None

    def _same_everywhere(self, step: Step) -> Glue | None:
        """Return the glue if it is the same after all probe histories, last turns and clocks, else None."""
        variants = [replace(step, base=base) for base in _probe_histories(self._dialect, tools=bool(step.tools))]
        probe, content = variants[0], step.turn.get("content")
        variants.append(replace(probe, now=step.now + timedelta(days=400)))
        if content:
            others = ("x", f"<think>\n{content}\n</think>\n\nx", content + "\n")
            variants += [replace(probe, turn={**step.turn, "content": text}) for text in others]
        else:
            # A chat template that skips empty text skips this turn; what then stands before the glue shows only where
            # the history is empty as well.
            variants.append(replace(probe, base=[{"role": "user", "content": ""}]))
        glues: list[Glue] = []
        for variant in variants:
            try:
                glues.append(self._deriver.derive(variant))
            except ChatTemplateError as error:
                if error.rule != "template-raised":
                    return None
            if glues and glues[-1] != glues[0]:
                return None
        return glues[0] if len(glues) > 1 else None

    # --- prompts

    def prompt_key(self, messages: Messages, tools: Tools | None, now: datetime) -> Hashable | None:
        """Return the key of prompts that differ in their last message's text; None for all but the plain ones."""
        if self._distrusted or not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= 2:
            return None
        try:
            texts = [message["content"] for message in messages if len(message) == 2]
            roles = [message["role"] for message in messages]
        except (KeyError, TypeError):
            return None
        if roles not in (["user"], ["system", "user"]) or [type(text) for text in texts] != [str] * len(roles):
            return None
        if not texts[-1].strip():
            return None
        clock = now if self._deriver.renderer.uses_clock else None
        return (self._tools_number(tools), tuple(texts[:-1]), clock)

    def prompt(self, key: Hashable, content: str) -> Encoded | None:
        """Return the prompt whose last message says ``content``, if a template was learned for it."""
        template = self.prompts.get(key)
        return None if template is None or self._tested.may_matter([content]) else template.encode([content])

    def learn_prompt(
        self, key: Hashable, messages: list[Message], tools: Tools | None, now: datetime, result: Encoded
    ) -> None:
        """Learn from a prompt that the reference answered, for those that differ in their last message's text."""
        *before, last = messages
        if key in self.prompts or self._tested.may_matter([last["content"]]):
            return
        self._make_room()
        word = Sentinels.draw().word
        decorated = BEFORE + word + AFTER
        template = None
        try:
            plain, dressed = (
                self._deriver.renderer.render([*before, {**last, "content": text}], tools, now)
                for text in (word, decorated)
            )
        except ChatTemplateError:
            pieces = None
        else:
            pieces = fit(_split(plain, [word]), [decorated], dressed)
        if pieces is not None and any(isinstance(piece, Slot) for piece in pieces):
            probes = [[last["content"]], [word], [decorated], [" "]]
            template = GlueTemplate(pieces, self._deriver.encoder, self._injection, probes)
            if template.encode([last["content"]]) != result:
                template = None
        self.prompts[key] = template

    # --- tools

    def _tools_number(self, tools: Tools | None) -> int:
        """Return a number that is the same for the same tool schemas.

        Known by identity, so the cost does not grow with what the schemas say; the objects are kept alive,
        so an identity is not taken over. Equal schemas in other objects get the same number once.
        """
        if not tools:
            return 0
        identity = tuple(map(id, tools))
        known = self._tools.get(identity)
        if known is None:
            self._make_room()
            try:
                digest: Hashable = marshal.dumps(list(tools), 2)
            except ValueError:
                digest = identity
            number = self._digests.setdefault(digest, len(self._digests) + 1)
            known = self._tools[identity] = (number, tuple(tools))
        return known[0]


# --- what decides whether the reference would answer the same ------------------------------------------------------

Pairs = frozenset[tuple[str, str]]


class Histories:
    """Which roles have followed which in a history: what chat templates that insist on an order look at.

    Invariant: equal to a scan of the whole history, but a history that goes on from one seen before costs only its
    new messages. Histories are recognised by the identity of their assistant turns, which are kept alive here.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Mapping[str, object], int, Pairs]] = {}
        self._characters = 0

    def pairs(self, history: Messages) -> Pairs:
        """Return the set of (role, next role) in ``history``, a turn with one call told from one with several.

        Raises:
            KeyError, TypeError, AttributeError: for messages that are not OpenAI-style.

        """
        last = len(history) - 1
        start, known = 0, frozenset[tuple[str, str]]()
        for position in range(last, -1, -1):
            message = history[position]
            if message["role"] != "assistant":
                continue
            seen = self._seen.get(id(message))
            if seen is not None and seen[0] is message and seen[1] == position:
                start, known = position + 1, seen[2]
                break
            if position < last:  # the turn before the last was not seen: nothing before it will be
                break
        if start > last:
            return known
        before = _kind(history[start - 1]) if start else ""
        kinds = [_kind(message) for message in history[start:]]
        pairs = known.union(zip([before, *kinds], kinds, strict=False))
        self._characters += len(repr(history[-1]))
        if self._characters > MOST_CHARACTERS or len(self._seen) > MOST_ENTRIES:
            self._seen.clear()  # what still goes on is scanned once more
            self._characters = len(repr(history[-1]))
        self._seen[id(history[-1])] = (history[-1], last, pairs)
        return pairs


def _kind(message: Mapping[str, Any]) -> str:
    content, role = message.get("content"), message["role"]
    if content is not None and type(content) is not str:
        raise TypeError("content that is not text is for the reference to refuse")
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if type(role) is not str or not all(type(name) is str for name in names):
        raise TypeError("so is this")
    return f"{role}{min(len(names), 2)}" if names else role


class TestedText:
    """What text a chat template looks for in messages: the literals that can make it treat one text unlike another.

    Invariant: if a message's text holds none of them, the template's own string tests (``in``, ``startswith``,
    ``split``, …) cannot tell it from any other ordinary text. Tests written in ways not seen here are what the audit is
    for; white space is left to the probes, since every text has some.
    """

    def __init__(self, trees: Sequence[nodes.Template]) -> None:
        from jinja2 import nodes

        whole: set[str] = set()
        inside: set[str] = set()
        for tree in trees:
            assigned: dict[str, set[str]] = {}
            for assign in tree.find_all(nodes.Assign):
                if isinstance(assign.target, nodes.Name):
                    assigned.setdefault(assign.target.name, set()).update(_literals(assign.node, {}))
            for compare in tree.find_all(nodes.Compare):
                for operand in compare.ops:
                    if operand.op in ("in", "notin"):
                        inside.update(_literals(compare.expr, assigned))
                    else:
                        whole.update(_literals(operand.expr, assigned), _literals(compare.expr, assigned))
            for call in tree.find_all(nodes.Call):
                if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
                    inside.update(text for argument in call.args for text in _literals(argument, assigned))
            for applied in tree.find_all(nodes.Filter):
                if applied.name in _TEXT_METHODS:
                    inside.update(text for argument in applied.args for text in _literals(argument, assigned))
        self._whole = frozenset(whole)
        self._inside = tuple(sorted(text for text in inside if text.strip()))

    def may_matter(self, texts: Sequence[str]) -> bool:
        """Return whether the chat template may treat one of the texts unlike others."""
        # A list: a generator costs more than the searches.
        return any(text in self._whole or True in [literal in text for literal in self._inside] for text in texts)


def _literals(node: nodes.Node | None, assigned: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the strings that an expression may be: a literal, a name for one, a choice of several."""
    from jinja2 import nodes

    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, nodes.Name):
        yield from assigned.get(node.name, ())
    elif isinstance(node, (nodes.List, nodes.Tuple, nodes.CondExpr)):
        for child in node.iter_child_nodes(exclude=("test",)):
            yield from _literals(child, assigned)


# --- probes ------------------------------------------------------------------------------------------------------


def _probe_histories(dialect: Dialect, *, tools: bool) -> Iterator[list[Message]]:
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


def _texts(step: Step) -> list[str]:
    return step.contents + [message.get("tool_call_id") or "" for message in step.new]


def _saying(new: Sequence[Message], words: Sentinels, before: str, after: str) -> list[Message]:
    """Return the messages with a word of its own in each that says anything."""
    return [
        {**message, "content": before + words.new(index) + after if message["content"] else ""}
        for index, message in enumerate(new)
    ]


def _with_other_ids(step: Step) -> Step:
    """Return the step with unguessable call ids, of the same length where that may matter."""
    calls = step.turn.get("tool_calls", ())
    ids = [call["id"] for call in calls] + [message.get("tool_call_id") for message in step.new]
    letters = string.ascii_letters
    named = {
        id_: "".join(secrets.choice(letters) for _ in range(len(id_) if id_.isalnum() and len(id_) >= 8 else 24))
        for id_ in ids
        if id_
    }
    turn = {**step.turn, "tool_calls": [{**call, "id": named[call["id"]]} for call in calls]} if calls else step.turn
    return replace(
        step,
        turn=turn,
        new=[
            {**message, "tool_call_id": named[message["tool_call_id"]]} if message.get("tool_call_id") else message
            for message in step.new
        ],
    )


def _split(text: str, words: Sequence[str]) -> list[str | int]:
    """Cut ``text`` at every occurrence of a word; words stand for their index."""
    pattern: list[str | int] = [text]
    for index, word in enumerate(words):
        if not word or word in words[:index]:
            continue
        cut: list[str | int] = []
        for piece in pattern:
            if isinstance(piece, str):
                for between in piece.split(word):
                    cut += [between, index]
                cut.pop()
            else:
                cut.append(piece)
        pattern = cut
    return pattern
