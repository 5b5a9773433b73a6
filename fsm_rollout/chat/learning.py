"""Learning a scaffold: whether a shape has the same glue after every history, and how text enters it.

Invariant: a scaffold is returned only if the reference gave one and the same glue on the real history and on
every probe history the template accepts, whatever the last turn said. A template that keeps state over the
conversation (DeepSeek, Command-R, Bielik) fails this and is served by the reference; no name is listed.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from fsm_rollout.chat.closing import probe_call, probe_result
from fsm_rollout.chat.derivation import Deriver, Glue, Sentinels
from fsm_rollout.chat.markers import MarkerEncoder, Part
from fsm_rollout.chat.messages import Dialect, Message, made_id
from fsm_rollout.chat.rendering import Renderer, Tools
from fsm_rollout.chat.scaffold import Scaffold, Slot, compiled, with_transforms
from fsm_rollout.errors import ChatTemplateError

BEFORE, AFTER = "\n \t", ' "q\\ \n\né\' <b>& {"a": [1]}  \n\n'
"""White space, quotes and escapes around a probe's word: they tell a trimmed slot from a JSON-encoded one."""


@dataclass(frozen=True, slots=True)
class Case:
    """One glue to learn from, as the reference sees it."""

    base: list[Message]
    turn: Message
    new: list[Message]
    tools: Tools | None
    sampled: int | None
    now: datetime
    glue: Glue


def values_of(new: Sequence[Message]) -> list[str]:
    """Return the values of the slots: each new message's content, then each one's tool call id."""
    return [message["content"] or "" for message in new] + [message.get("tool_call_id") or "" for message in new]


def probe_histories(dialect: Dialect) -> Iterator[list[Message]]:
    """Yield conversations that end where an assistant turn may follow, as unlike each other as they come."""

    def user(text: str = "u") -> Message:
        return {"role": "user", "content": text}

    def call(index: int) -> list[Message]:
        turn, result = probe_call(dialect, "v"), probe_result("r")
        id_ = made_id(index, 0)
        turn["tool_calls"][0]["id"] = id_
        return [turn, {**result, "tool_call_id": id_}]

    system: Message = {"role": "system", "content": "s"}
    said: Message = {"role": "assistant", "content": "a"}
    thought: Message = {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}
    yield [user()]
    yield [system, user()]
    yield [user(), said, user("u2")]
    yield [user(), *call(1)]
    yield [system, user(), *call(2), *call(4)]
    yield [user(), *call(1), said, user("u2")]
    yield [user(), thought, user("u2"), *call(3)]
    yield [user(), said, user("u2"), said, user("u3"), *call(5), said, user("u4")]


class Learner:
    """Learns the scaffolds of one template."""

    def __init__(self, deriver: Deriver, renderer: Renderer, encoder: MarkerEncoder, dialect: Dialect) -> None:
        self._deriver = deriver
        self._renderer = renderer
        self._encoder = encoder
        self._dialect = dialect

    def learn(self, case: Case, dropped: int) -> Scaffold | None:
        """Return a scaffold for all glue of this shape, or None if there is none that can be trusted."""
        words = Sentinels.draw()
        names = {id_: _like(id_) for id_ in _ids(case.turn, case.new)}
        turn, new = _with_ids(case.turn, case.new, names)
        plain = [
            {**message, "content": words.new(index) if message["content"] else ""} for index, message in enumerate(new)
        ]
        decorated = [
            {**message, "content": BEFORE + message["content"] + AFTER if message["content"] else ""}
            for message in plain
        ]
        shown = replace(case, turn=turn, new=plain)
        glues = self._everywhere(shown)
        if glues is None:
            return None
        values = values_of(plain)
        pattern = _split(glues.text, values)
        try:
            dressed = self._derive(replace(shown, new=decorated))
        except ChatTemplateError:
            return None
        if not (dressed.close == glues.close == case.glue.close and dressed.opener == glues.opener == case.glue.opener):
            return None
        pieces = with_transforms(pattern, values_of(decorated), dressed.text)
        if pieces is None:
            return None
        probes = [values_of(case.new), values, values_of(decorated), [" " + value for value in values]]
        scaffold = compiled([case.glue.close.text, *pieces], self._encoder, probes, dropped)
        return scaffold if serves(scaffold, case) else None

    def _derive(self, case: Case) -> Glue:
        return self._deriver.derive(case.base, case.turn, case.new, case.tools, case.sampled, case.now)

    def _everywhere(self, case: Case) -> Glue | None:
        """Return the glue if it is the same after all probe histories, last turns and clocks, else None."""
        first: Glue | None = None
        seen = 0
        said = case.turn.get("content")
        for base in probe_histories(self._dialect):
            probe = replace(case, base=base)
            if not case.tools and any(message.get("tool_calls") for message in base):
                continue
            variants = [probe]
            if seen == 0:
                variants.append(replace(probe, now=case.now + timedelta(days=400)))
                if not said:
                    # A template that skips empty text skips this turn; what then stands before the glue shows
                    # only where the history is empty as well.
                    variants.append(replace(probe, base=[{"role": "user", "content": ""}]))
                else:
                    variants += [
                        replace(probe, turn={**case.turn, "content": text})
                        for text in ("x", f"<think>\n{said}\n</think>\n\nx", said + "\n")
                    ]
            for variant in variants:
                try:
                    glue = self._derive(variant)
                except ChatTemplateError as error:
                    if error.rule == "template-raised":
                        continue
                    return None
                first = first or glue
                if (glue.close, glue.opener, glue.text) != (first.close, first.opener, first.text):
                    return None
                seen += 1
        return first if seen > 1 else None

    def learn_prompt(self, messages: list[Message], slot: int, tools: Tools | None, now: datetime) -> Scaffold | None:
        """Return a scaffold for prompts that differ from this one in the content of message ``slot`` only."""
        word = Sentinels.draw().word
        values = [messages[slot]["content"]]
        probes = [[word], [BEFORE + word + AFTER]]
        try:
            plain, dressed = (
                self._renderer.render(
                    [*messages[:slot], {**messages[slot], "content": probe}, *messages[slot + 1 :]], tools, now
                )
                for (probe,) in probes
            )
        except ChatTemplateError:
            return None
        pieces = with_transforms(_split(plain, [word]), probes[1], dressed)
        if pieces is None or not any(isinstance(piece, Slot) for piece in pieces):
            return None
        return compiled(pieces, self._encoder, [values, *probes, [" "]], 0)


def serves(scaffold: Scaffold, case: Case) -> bool:
    """Return whether a scaffold gives this case's glue, text and scaffold markers alike."""
    parts = [Part(case.glue.close.text), *case.glue.parts]
    return scaffold.text(values_of(case.new)) == "".join(part.text for part in parts)


def _split(text: str, words: Sequence[str]) -> list[str | int]:
    """Cut ``text`` at every occurrence of a word; words stand for their index."""
    pattern: list[str | int] = [text]
    for index, word in enumerate(words):
        if not word or word in words[:index]:
            continue
        cut: list[str | int] = []
        for piece in pattern:
            if not isinstance(piece, str):
                cut.append(piece)
                continue
            for number, between in enumerate(piece.split(word)):
                if number:
                    cut.append(index)
                cut.append(between)
        pattern = cut
    return pattern


def _ids(turn: Message, new: Sequence[Message]) -> list[str]:
    ids = [call["id"] for call in turn.get("tool_calls", ())]
    ids += [message["tool_call_id"] for message in new if message.get("tool_call_id")]
    return list(dict.fromkeys(ids))


def _like(id_: str) -> str:
    """Return an unguessable id of the same length; short ones and those with punctuation get a new look."""
    size = len(id_) if id_.isalnum() and len(id_) >= 8 else 24
    return "".join(secrets.choice(string.ascii_letters) for _ in range(size))


def _with_ids(turn: Message, new: Sequence[Message], names: dict[str, str]) -> tuple[Message, list[Message]]:
    turn = dict(turn)
    if turn.get("tool_calls"):
        turn["tool_calls"] = [{**call, "id": names[call["id"]]} for call in turn["tool_calls"]]
    return turn, [
        {**message, "tool_call_id": names[message["tool_call_id"]]} if message.get("tool_call_id") else message
        for message in new
    ]
