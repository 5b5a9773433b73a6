"""How glue without a render is learned: a template of it is taken from the reference, and probed before it is believed.

Invariant: a :class:`~fsm_rollout.chat.glue_cache.GlueTemplate` is learned for a shape only if the reference gives the
same glue after ten unlike histories and the real one. Every shape of a chat template that keeps state over the
conversation (DeepSeek's or Command-R's, which the probes find out; no list of names does) is left to the reference.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from fsm_rollout.chat.derive import Glue, Slot, Step, draw_word, fit
from fsm_rollout.chat.glue_cache import GlueCache, GlueTemplate, Shape
from fsm_rollout.chat.markers import Encoded, Place, places_of
from fsm_rollout.chat.messages import PICTURE, with_texts
from fsm_rollout.chat.reference import FollowUp, Opening, PromptParts, Reference
from fsm_rollout.chat.render import shown_tools
from fsm_rollout.chat.turn_ends import probe_histories
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import media_of, text_of

# White space, quotes and escapes around a probe's word: they tell a trimmed slot from a JSON-encoded one.
BEFORE, AFTER = "\n \t", ' "q\\ \n\né\' <b>& {"a": [1]}  \n\n'


class GlueLearner:
    """Fills the cache of one chat template."""

    def __init__(self, cache: GlueCache, reference: Reference) -> None:
        self._cache, self._reference, self._deriver = cache, reference, reference.deriver

    def learn(self, shape: Shape, asked: Opening | FollowUp) -> Encoded | None:
        """Answer by the reference, and learn from it for the next question of the shape.

        Pictures are their placeholders still. ``None``: nothing is to be learned of the shape.
        """
        cache = self._cache
        if shape.key in cache.templates:
            return None
        if isinstance(asked, Opening):
            if len(asked.messages) > 2:  # texts of users before the last one: seldom will there be another such prompt
                return None
            encoded, prompt = self.prompt(shape, asked)
            cache.make_room()
            cache.templates[shape.key] = prompt
            return encoded
        step, glue = self._reference.glue(asked)
        encoded = glue.encode(self._deriver.encoder, self._reference.injection)
        # A template learned with other tools or after another order of roles is taken over if it gives what the
        # reference gives.
        cache.make_room()
        template = cache.templates.get(shape.general)
        if template is None or template.text(shape.texts) != glue.close.text + glue.text:
            template = self._learned(step, glue, encoded)
            cache.templates[shape.general] = template
        cache.templates[shape.key] = template
        return encoded

    def _learned(self, step: Step, glue: Glue, result: Encoded) -> GlueTemplate | None:
        """Return a template for all glue of this shape, or None if there is none that can be trusted."""
        # 1. Unguessable words for text and ids; as they are, and with white space and quotes around them.
        named = _with_other_ids(step)
        word = draw_word()

        def saying(before: str, after: str) -> Step:
            words = {i: f"{before}{word}{i}m{after}" if text else "" for i, text in enumerate(named.texts.texts)}
            return replace(named, new=with_texts(named.new, words))

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
        dropped = int(glue.close_sampled)
        return self._fitted(shown, words, _texts(step), result, owners=step.texts.owners, dropped=dropped)

    def _fitted(
        self,
        shown: tuple[str, str],
        words: tuple[list[str], list[str]],
        texts: list[str],
        result: Encoded,
        *,
        owners: Sequence[int],
        fixed: Sequence[Place] = (),
        dropped: int = 0,
    ) -> GlueTemplate | None:
        """Return the template that shows plain and decorated words so, if it gives ``result`` for the real texts.

        The first texts are those of the messages that are their ``owners``.
        """
        pieces = fit(_split(shown[0], words[0]), words[1], shown[1])
        if pieces is None:
            return None
        pieces = [
            replace(piece, is_message=False) if isinstance(piece, Slot) and piece.index >= len(owners) else piece
            for piece in pieces
        ]
        probes = [texts, *words, [f" {word}" for word in words[0]]]
        encoder, injection = self._deriver.encoder, self._reference.injection
        template = GlueTemplate(pieces, encoder, injection, probes, owners, fixed, dropped)
        return template if template.encode(texts) == result else None

    def _same_everywhere(self, step: Step) -> Glue | None:
        """Return the glue if it is the same after all probe histories, last turns and clocks, else None."""
        histories = list(probe_histories(self._reference.dialect, tools=bool(step.tools)))
        if any(map(media_of, step.new)):  # a template may count pictures
            seen: Message = {"role": "user", "content": [PICTURE, PICTURE, {"type": "text", "text": "u"}]}
            histories.append([seen, {"role": "assistant", "content": "a"}, seen])
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

    def prompt(self, shape: Shape, asked: Opening) -> tuple[Encoded, GlueTemplate | None]:
        """Answer by the reference; give a template for prompts that differ in their last message's text, if one can be.

        Any thread may ask: the cache is left alone.
        """
        prompt = self._reference.prompt(asked)
        encoded = self._deriver.encoder.encode_parts(prompt.parts, self._reference.injection)
        return encoded, self._learned_prompt(prompt, asked, shape.texts, encoded)

    def _learned_prompt(
        self, prompt: PromptParts, asked: Opening, texts: list[str], result: Encoded
    ) -> GlueTemplate | None:
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
        return self._fitted((plain, dressed), words, texts, result, owners=range(len(prompt.messages)), fixed=fixed)


# --- probes


def _texts(step: Step) -> list[str]:
    return step.texts.texts + [message.get("tool_call_id") or "" for message in step.new]


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
