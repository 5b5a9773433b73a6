"""Drawn bodies: whatever a client sends, it is answered, or told in its protocol what is wrong."""

import asyncio
import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import aiohttp
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.strategies.calls import plain_data
from tests.cases import table
from tests.foreign import agent, check_exact

PATHS = {"openai": "/chat/completions", "responses": "/responses", "anthropic": "/v1/messages"}
BODIES: dict[str, Any] = table("foreign_bodies")
ODD = st.sampled_from(["", "\ud800", "\x00", "<|im_end|>", "text", "assistant", "x" * 300]) | st.text(max_size=5)
VALUES = plain_data(ODD, st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_leaves=3)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a body."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


@st.composite
def bodies(draw: st.DrawFn, dialect: str) -> Any:
    """Draw a good body in which some things are something else, or missing."""
    body = deepcopy(BODIES[dialect])
    for _ in range(draw(st.integers(1, 2))):
        *above, key = draw(st.sampled_from(list(places(body))))
        holder = body
        for step in above:
            holder = holder[step]
        if draw(st.booleans()):
            holder[key] = draw(VALUES)
        else:
            del holder[key]
    return body


def changed(dialect: str, *path: Any, to: Any) -> tuple[str, list[Any]]:
    """Return a good body in which one thing is something else, as an example."""
    body = holder = deepcopy(BODIES[dialect])
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return dialect, [body]


def sent_in(dialect: str) -> st.SearchStrategy[tuple[str, list[Any]]]:
    """Return what draws the bodies of one agent."""
    return st.tuples(st.just(dialect), st.lists(bodies(dialect), min_size=1, max_size=8))


SENT: list[Any] = []
ANSWERED: list[tuple[int, str]] = []


async def sends(visit: ForeignVisit) -> None:
    """Send all bodies, one after the other, and see what comes."""
    dialect, *all_bodies = SENT
    headers = {"Authorization": f"Bearer {visit.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for body in all_bodies:
            async with http.post(visit.base_url + PATHS[dialect], data=json.dumps(body).encode()) as answer:
                ANSWERED.append((answer.status, await answer.text()))


@given(sent=st.one_of(*map(sent_in, PATHS)))
@example(sent=changed("openai", "tools", 0, "function", "name", to=None))
@example(sent=changed("responses", "tools", 0, "name", to=None))
@example(sent=changed("anthropic", "tools", 0, "name", to=None))
@settings(max_examples=settings().max_examples * len(PATHS))
def test_whatever_is_sent_is_answered_or_refused_in_words(sent: tuple[str, list[Any]]) -> None:
    dialect, drawn = sent
    SENT[:] = [dialect, *drawn, BODIES[dialect]]
    ANSWERED.clear()
    engine = ScriptedEngine(lambda request: "It is 42.", tokenizer=embedded_tokenizer(), log=True)

    async def main() -> list[Any]:
        graph = agent(f"use: 'tests.laws.test_foreign_bodies:sends', dialect: {dialect}")
        async with fr.Rollout(graph, engine) as rollout:
            return [t async for group in rollout.stream(["x"], 1) for t in group.trajectories]

    trajectories = asyncio.run(main())
    assert [t.stop_reason for t in trajectories] == ["answered"], trajectories[0].detail
    for body, (status, text) in zip(SENT[1:], ANSWERED, strict=True):
        assert status in (200, 400), (body, text)
        if status == 400:
            assert json.loads(text)["error"]["message"]
    assert ANSWERED[-1][0] == 200, "the good body after all others is answered"
    check_exact(trajectories, engine)
