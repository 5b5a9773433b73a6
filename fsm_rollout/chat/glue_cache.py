"""Glue and prompts without a render: templates of glue, learned from the reference and checked by probes.

Invariant: an answer given here is the one the reference gave, or would give. A :class:`GlueTemplate` is learned for a
*shape* (the roles, keys, names and kinds of the last turn and the new messages) only if the reference gives the same
glue after ten unlike histories and the real one, and it is used only with tools and role orders for which it has given
the reference's answer. What is unusual (odd messages, text that the chat template itself looks for) has no shape and is
rendered in full; so is every shape of a template that keeps state over the conversation (DeepSeek's or Command-R's,
which the probes find out; no list of names does). After :meth:`GlueCache.distrust` nothing is answered here again.
"""

from __future__ import annotations

import json
import marshal
import re
import secrets
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from fsm_rollout.chat.derive import Glue, Slot, Step, draw_word, fit
from fsm_rollout.chat.glue_template import MOST_ENTRIES, GlueTemplate
from fsm_rollout.chat.markers import Encoded, Place, places_of
from fsm_rollout.chat.messages import Messages, made_id
from fsm_rollout.chat.reference import FollowUp, Opening, PromptParts, Reference
from fsm_rollout.chat.render import Tools, shown_tools
from fsm_rollout.chat.turn_ends import probe_histories
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.stream import only_text_of, text_of

if TYPE_CHECKING:
    from jinja2 import nodes

# White space, quotes and escapes around a probe's word: they tell a trimmed slot from a JSON-encoded one.
BEFORE, AFTER = "\n \t", ' "q\\ \n\né\' <b>& {"a": [1]}  \n\n'
# What the cache keeps: MOST_ENTRIES of a kind, and turns of about so many characters. Then it begins anew.
MOST_CHARACTERS = 2**24
MESSAGE_CHARACTERS = 256  # what a turn counts besides its text

_TEXT_METHODS = frozenset({"startswith", "endswith", "split", "rsplit", "replace", "find", "rfind", "index", "count"})
_TEXT_METHODS |= {"partition", "rpartition", "removeprefix", "removesuffix"}
_TURN_KEYS = frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"})
_PROMPT_KEYS = frozenset({"role", "content"})
_NEW_KEYS = frozenset({"role", "content", "name", "tool_call_id"})


class Shape(NamedTuple):
    """A question without its text. ``general`` leaves out the tools and the order of roles before it."""

    key: Hashable
    general: Hashable
    texts: list[str]  # what fills the slots: each message's text, then each one's tool call id


class GlueCache:
    """What was learned of one chat template; bounded, shared by all trajectories."""

    def __init__(self, reference: Reference) -> None:
        self._reference, self._deriver = reference, reference.deriver
        self._tested, self._compared = tested_texts(self._deriver.renderer.trees())
        self._distrusted = False
        self._forget()

    def _forget(self) -> None:
        self.histories = Histories()
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
            self._make_room()
            self._tools[identity] = marshal.dumps(list(tools), 2), tuple(tools)  # of a tuple, this is the same object
        return self._tools[identity][0]

    def _make_room(self) -> None:
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
            said, *contents = map(only_text_of, (turn, *new_messages))
            key: list[Hashable] = [sampled, tuple(turn), bool(said)]
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
            for index, (message, content) in enumerate(zip(new_messages, contents, strict=True), position + 1):
                role = message["role"]
                name, id_ = message.get("name"), message.get("tool_call_id")
                if type(role) is not str or not (name is None or type(name) is str):
                    return None
                if role == "assistant" or content.isspace() or not message.keys() <= _NEW_KEYS:
                    return None
                if role != "tool" and id_ is not None:
                    return None
                if role == "tool" and id_ is None:
                    id_ = open_ids.pop(0) if open_ids else made_id(index, 0)
                elif id_ in open_ids:
                    open_ids.remove(id_)
                ids.append(id_ or "")
                key.append((role, tuple(message), name, bool(content), len(ids[-1])))
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

    def learn(self, shape: Shape, asked: Opening | FollowUp) -> Encoded:
        """Answer by the reference, and learn from it for the next question of the shape."""
        if shape.key in self.templates:
            return self._reference.encode(asked)  # for good
        encoder, injection = self._deriver.encoder, self._reference.injection
        if isinstance(asked, Opening):
            prompt = self._reference.prompt(asked)
            encoded = encoder.encode_parts(prompt.parts, injection)
            self._make_room()
            self.templates[shape.key] = self._learned_prompt(prompt, asked, shape.texts, encoded)
            return encoded
        step, glue = self._reference.glue(asked)
        encoded = glue.encode(encoder, injection)
        # A template learned with other tools or after another order of roles is taken over if it gives what the
        # reference gives.
        self._make_room()
        template = self.templates.get(shape.general)
        if template is None or template.text(shape.texts) != glue.close.text + glue.text:
            template = self._learned(step, glue, encoded)
            self.templates[shape.general] = template
        self.templates[shape.key] = template
        return encoded

    def _learned(self, step: Step, glue: Glue, result: Encoded) -> GlueTemplate | None:
        """Return a template for all glue of this shape, or None if there is none that can be trusted."""
        # 1. Unguessable words for text and ids; as they are, and with white space and quotes around them.
        named = _with_other_ids(step)
        word = draw_word()

        def saying(before: str, after: str) -> Step:
            new = [
                {**message, "content": f"{before}{word}{index}m{after}" if text_of(message) else ""}
                for index, message in enumerate(named.new)
            ]
            return replace(named, new=new)

        plain, decorated = saying("", ""), saying(BEFORE, AFTER)
        # 2. The glue must be the same after every history, whatever the turn said, and whenever.
        same = self._same_everywhere(plain)
        if same is None:
            return None
        try:
            dressed = self._deriver.derive(decorated)
        except ChatTemplateError:
            return None
        if not (same.close, same.opener) == (dressed.close, dressed.opener) == (glue.close, glue.opener):
            return None
        # 3. Later texts are written in the way in which these words were.
        shown = (glue.close.text + same.text, glue.close.text + dressed.text)
        words = _texts(plain), _texts(decorated)
        count, dropped = len(step.new), int(glue.close_sampled)
        return self._fitted(shown, words, _texts(step), result, messages=count, dropped=dropped)

    def _fitted(
        self,
        shown: tuple[str, str],
        words: tuple[list[str], list[str]],
        texts: list[str],
        result: Encoded,
        *,
        messages: int,
        fixed: Sequence[Place] = (),
        dropped: int = 0,
    ) -> GlueTemplate | None:
        """Return the template that shows plain and decorated words so, if it gives ``result`` for the real texts.

        The first so many texts are the ``messages``'.
        """
        pieces = fit(_split(shown[0], words[0]), words[1], shown[1])
        if pieces is None:
            return None
        pieces = [
            replace(piece, is_message=False) if isinstance(piece, Slot) and piece.index >= messages else piece
            for piece in pieces
        ]
        probes = [texts, *words, [f" {word}" for word in words[0]]]
        template = GlueTemplate(pieces, self._deriver.encoder, self._reference.injection, probes, fixed, dropped)
        return template if template.encode(texts) == result else None

    def _same_everywhere(self, step: Step) -> Glue | None:
        """Return the glue if it is the same after all probe histories, last turns and clocks, else None."""
        histories = probe_histories(self._reference.dialect, tools=bool(step.tools))
        variants = [replace(step, base=base) for base in histories]
        probe, content = variants[0], text_of(step.turn)
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

    def prompt_shape(self, messages: Messages, tools: Tools | None, now: datetime) -> Shape | None:
        """Return the shape of prompts that differ in their last message's text; None for all but the plain ones."""
        if self._distrusted or not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= 2:
            return None
        try:
            texts = list(map(only_text_of, messages))
            roles = list(map(itemgetter("role"), messages))
            digest = self._tools_digest(tools)
        except (KeyError, TypeError, AttributeError, ValueError):
            return None
        if roles not in (["user"], ["system", "user"]) or {*map(frozenset, messages)} != {_PROMPT_KEYS}:
            return None
        if not texts[-1].strip() or self._may_matter(texts[-1:]):
            return None
        key = digest, tuple(texts[:-1]), now if self._deriver.renderer.uses_clock else None
        return Shape(key, key, texts)

    def _learned_prompt(
        self, prompt: PromptParts, asked: Opening, texts: list[str], result: Encoded
    ) -> GlueTemplate | None:
        """Return a template for prompts that differ in their last message's text, or None if there is none."""
        *before, last = prompt.messages
        none = [""] * len(before)
        word = draw_word()
        words = [*none, word], [*none, BEFORE + word + AFTER]
        tools, now = shown_tools(asked.tools), asked.now or self._reference.now
        try:
            plain, dressed = (
                self._deriver.renderer.render([*before, {**last, "content": text}], tools, now) for *_, text in words
            )
        except ChatTemplateError:
            return None
        fixed = [place for place in places_of(prompt.parts) if place[0] < len(before)]
        return self._fitted((plain, dressed), words, texts, result, messages=len(prompt.messages), fixed=fixed)


# --- what decides whether the reference would answer the same

Pairs = frozenset[tuple[str, str]]


class Histories:
    """Which roles have followed which in a history: what chat templates that insist on an order look at.

    Invariant: equal to a scan of the whole history, but a history that goes on from one seen before costs only its
    new messages. Histories are recognised by the identity of their assistant turns, which are kept alive here.
    """

    def __init__(self) -> None:
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
        texts = list(map(only_text_of, history[start:]))
        previous_kind = _kind(history[start - 1]) if start else ""
        new_pairs = tuple(pairwise([previous_kind, *map(_kind, history[start:])]))
        pairs = known_pairs if known_pairs.issuperset(new_pairs) else known_pairs.union(new_pairs)
        self._characters += MESSAGE_CHARACTERS + len(texts[-1])
        if self._characters > MOST_CHARACTERS or len(self._seen) > MOST_ENTRIES:
            self._seen.clear()  # conversations under way are then scanned once more
            self._characters = 0
        self._seen[id(history[-1]), last] = history[-1], pairs
        return pairs


def _kind(message: Mapping[str, Any]) -> str:
    role = message["role"]
    if type(role) is not str:
        raise TypeError("so is this")
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


# --- probes


def _texts(step: Step) -> list[str]:
    return step.contents + [message.get("tool_call_id") or "" for message in step.new]


def _with_other_ids(step: Step) -> Step:
    """Return the step with unguessable call ids, of the same length where that may matter."""
    calls = step.turn.get("tool_calls", ())
    named: dict[str | None, str] = {}
    for id_ in [call["id"] for call in calls] + [message.get("tool_call_id") for message in step.new]:
        if id_:
            size = len(id_) if len(id_) >= 8 else 24
            named[id_] = secrets.token_hex(size)[:size]
    turn = {**step.turn, "tool_calls": [{**call, "id": named[call["id"]]} for call in calls]} if calls else step.turn
    new = [
        {**message, "tool_call_id": named[message["tool_call_id"]]} if message.get("tool_call_id") else message
        for message in step.new
    ]
    return replace(step, turn=turn, new=new)


def _split(text: str, words: Sequence[str]) -> list[str | int]:
    """Cut ``text`` at every occurrence of a word; words stand for their index, equal ones for the first one's."""
    numbers = {word: index for index, word in reversed(list(enumerate(words))) if word}
    pieces = re.split(f"({'|'.join(map(re.escape, numbers))})", text) if numbers else [text]
    return [numbers.get(piece, piece) for piece in pieces]
