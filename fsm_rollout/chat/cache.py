"""The fast path: glue and prompts answered from scaffolds, without a render.

Invariant: an answer given here is the one the reference gave, or would give: a scaffold enters the cache only if
it reproduces the reference's ids on the step it was learned from, and no text that the template itself looks for
is ever put into one. After :meth:`Cache.distrust` nothing is answered here again.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fsm_rollout.chat.adjacency import Adjacency
from fsm_rollout.chat.learning import Case, Learner, serves
from fsm_rollout.chat.markers import Encoded, Injection, MarkerEncoder
from fsm_rollout.chat.messages import Message
from fsm_rollout.chat.rendering import Renderer, Tools
from fsm_rollout.chat.scaffold import Recent, Scaffold
from fsm_rollout.chat.shape import Shape, shape_of
from fsm_rollout.chat.tested_text import TestedText

UNSERVED = Scaffold((), ())
"""Stands in a cache for a shape that only the reference can serve."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that may have a scaffold. ``general`` leaves out the tools and the order of roles before it."""

    key: Hashable
    general: Hashable
    shape: Shape


class Cache:
    """The scaffolds of one template, for glue and for prompts; bounded, shared by all trajectories."""

    def __init__(self, learner: Learner, renderer: Renderer, encoder: MarkerEncoder, injection: Injection) -> None:
        self._learner = learner
        self._encoder = encoder
        self._injection: Injection = injection
        self._uses_clock = renderer.uses_clock
        self._tested = TestedText(renderer.trees())
        self._adjacency = Adjacency()
        self._glue: Recent[Hashable, Scaffold] = Recent(4096)
        self._by_shape: Recent[Hashable, Scaffold] = Recent(1024)
        self._prompts: Recent[Hashable, Scaffold] = Recent(256)
        self._tools: Recent[tuple[int, ...], tuple[int, tuple[object, ...]]] = Recent(1024)
        self._digests: Recent[Hashable, int] = Recent(1024)
        self._tools_seen = 0
        self._distrusted = False

    def distrust(self) -> None:
        """Give no answer from here on."""
        self._distrusted = True
        self._glue.clear()
        self._by_shape.clear()
        self._prompts.clear()

    # --- glue ---------------------------------------------------------------------------------------------------------

    def step(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        sampled: int | None,
    ) -> Step | None:
        """Return the step that the scaffolds are known by; None if it is not an ordinary one."""
        shape = None if self._distrusted else shape_of(history, new_messages, self._adjacency)
        if shape is None:
            return None
        return Step((sampled, self._tools_key(tools), shape.key, shape.pairs), (sampled, shape.key), shape)

    def glue(self, step: Step) -> Encoded | None:
        """Return the glue of a step, if there is a scaffold for it and the template treats its text like any other."""
        scaffold = self._glue.get(step.key)
        if scaffold is None or scaffold is UNSERVED or self._may_matter(step):
            return None
        return scaffold.encode(step.shape.values(), self._encoder, self._injection)

    def serves(self, step: Step) -> bool:
        """Return whether :meth:`glue` would answer."""
        return self._glue.get(step.key) not in (None, UNSERVED) and not self._may_matter(step)

    def learn(self, step: Step, case: Case, result: Encoded, dropped: int) -> None:
        """Learn a scaffold from a step that the reference answered, for the next one of its shape.

        One learned with other tools or after another order of roles is taken over if it gives what the
        reference gives.
        """
        if self._glue.get(step.key) is not None or self._may_matter(step):
            return  # served by the reference for good; or wait for text the template does not look at
        scaffold = self._by_shape.get(step.general)
        if scaffold is None or scaffold is UNSERVED or not serves(scaffold, case):
            scaffold = self._learner.learn(case, dropped) or UNSERVED
            if (
                scaffold is not UNSERVED
                and scaffold.encode(step.shape.values(), self._encoder, self._injection) != result
            ):
                scaffold = UNSERVED
            self._by_shape.put(step.general, scaffold)
        self._glue.put(step.key, scaffold)

    def _may_matter(self, step: Step) -> bool:
        return any(map(self._tested.may_matter, step.shape.contents))

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prompt_key(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, now: datetime) -> Hashable | None:
        """Return the key of prompts that differ in their last message's text; None for all but the plain ones."""
        if self._distrusted or not isinstance(messages, (list, tuple)):
            return None
        try:
            *before, last = messages
            content = last["content"]
            if last["role"] != "user" or len(last) != 2 or type(content) is not str or not content.strip():
                return None
            if len(before) > 1:
                return None
            system = None
            if before:
                system = before[0]["content"]
                if before[0]["role"] != "system" or len(before[0]) != 2 or type(system) is not str:
                    return None
        except (KeyError, TypeError, ValueError):
            return None
        return (self._tools_key(tools), system, now if self._uses_clock else None)

    def prompt(self, key: Hashable, content: str) -> Encoded | None:
        """Return the prompt whose last message says ``content``, if there is a scaffold for it."""
        scaffold = self._prompts.get(key)
        if scaffold is None or scaffold is UNSERVED or self._tested.may_matter(content):
            return None
        return scaffold.encode([content], self._encoder, self._injection)

    def learn_prompt(
        self, key: Hashable, messages: list[Message], tools: Tools | None, now: datetime, result: Encoded
    ) -> None:
        """Learn a scaffold from a prompt that the reference answered."""
        content = messages[-1]["content"]
        if self._prompts.get(key) is not None or self._tested.may_matter(content):
            return
        scaffold = self._learner.learn_prompt(messages, len(messages) - 1, tools, now)
        if scaffold is None or scaffold.encode([content], self._encoder, self._injection) != result:
            scaffold = UNSERVED
        self._prompts.put(key, scaffold)

    # --- tools --------------------------------------------------------------------------------------------------------

    def _tools_key(self, tools: Tools | None) -> int:
        """Return a number that is the same for the same tool schemas.

        Known by identity, so the cost does not grow with what the schemas say; the objects are kept alive,
        so an identity is not taken over. Equal schemas in other objects get the same number once.
        """
        if not tools:
            return 0
        identity = tuple(map(id, tools))
        known = self._tools.get(identity)
        if known is None:
            try:
                digest: Hashable = marshal.dumps(list(tools), 2)
            except ValueError:
                digest = identity
            number = self._digests.get(digest)
            if number is None:
                self._tools_seen += 1
                number = self._digests.put(digest, self._tools_seen)
            known = self._tools.put(identity, (number, tuple(tools)))
        return known[0]
