"""A simulated server: what it keeps, what it evicts, and when its tokens come, computed here token by token."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.prefix_cache import PrefixCache, PrefixNode
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.tokens import as_ids

pytestmark = pytest.mark.virtual_time

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


class Kept:
    """Prefixes one by one, and who holds or has locked each: what the tree must say, without a tree."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[int, ...]] = set()
        self.locked: list[tuple[tuple[int, ...], PrefixNode]] = []
        self.held: dict[str, set[tuple[int, ...]]] = {}

    @staticmethod
    def within(sequence: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {sequence[:end] for end in range(1, len(sequence) + 1)}

    def longest(self, sequence: tuple[int, ...]) -> int:
        return max((len(prefix) for prefix in self.within(sequence) & self.prefixes), default=0)

    def in_use(self) -> set[tuple[int, ...]]:
        return set[tuple[int, ...]]().union(*(self.within(sequence) for sequence, _ in self.locked))


@given(st.lists(st.tuples(st.sampled_from(["keep", "lock", "unlock", "hold", "release", "evict"]), SEQUENCES)))
def test_the_tree_keeps_what_was_kept_until_it_is_evicted_and_evicts_nothing_in_use(
    steps: list[tuple[str, Any]],
) -> None:
    cache, kept = PrefixCache(), Kept()
    for what, sequence in steps:
        ids, session = as_ids(sequence), f"s{sequence[0]}"
        match what:
            case "keep":
                _, new = cache.insert(ids)
                assert new == len(sequence) - kept.longest(sequence)
                kept.prefixes |= kept.within(sequence)
            case "lock":
                node, length = cache.match(ids)
                cache.lock(node)
                kept.locked.append((sequence[:length], node))
            case "unlock" if kept.locked:
                cache.unlock(kept.locked.pop()[1])
            case "hold":
                node, length = cache.match(ids)
                cache.hold(session, node)
                kept.held.setdefault(session, set()).update(kept.within(sequence[:length]))
            case "release":
                cache.release(session)
                kept.held.pop(session, None)
            case "evict":
                before, in_use = set(kept.prefixes), kept.in_use()
                gone = cache.evict(len(sequence))
                kept.prefixes = {prefix for prefix in before if cache.match(as_ids(prefix))[1] == len(prefix)}
                assert gone == len(before) - len(kept.prefixes) >= min(len(sequence), len(before - in_use))
                assert in_use <= kept.prefixes
                # What a session holds goes only when all else has gone.
                held = set[tuple[int, ...]]().union(*kept.held.values())
                if (before - kept.prefixes) & held:
                    assert kept.prefixes <= held | in_use
        assert cache.match(ids)[1] == kept.longest(sequence)
        assert (cache.size, cache.locked) == (len(kept.prefixes), len(kept.in_use()))


def ask(name: str, prompt: int, tokens: int, *, first: int = 0, session: str = "") -> Request:
    return Request(name, as_ids(range(first, first + prompt)), SamplingParams(tokens, ignore_eos=True), session=session)


async def collect(engine: SimulatedEngine, *requests: Request) -> dict[str, list[tuple[float, Chunk]]]:
    found: dict[str, list[tuple[float, Chunk]]] = {}
    async for chunk in engine.generate(requests):
        found.setdefault(chunk.request_id, []).append((asyncio.get_running_loop().time(), chunk))
    return found


def engine(tokenizer: Any, tokens: int = 1000, *, said: int = 10, **options: Any) -> SimulatedEngine:
    memory = Memory(tokens=tokens, fill=0.001, step=0.1, **options)
    return SimulatedEngine(lambda request: Turn(ids=tuple(range(100, 100 + said))), tokenizer=tokenizer, memory=memory)


def times(answers: dict[str, list[tuple[float, Chunk]]]) -> dict[str, list[float]]:
    return {name: [round(at, 6) for at, _ in chunks] for name, chunks in answers.items()}


def test_a_prompt_is_filled_then_each_step_says_a_token_of_every_request(tokenizer: Any) -> None:
    both = collect(engine(tokenizer), ask("a", 100, 10), ask("b", 50, 5, first=500))
    assert times(run_virtual(both)) == {"a": [0.0, 1.05], "b": [0.0, 0.55]}  # the first token comes with the filling


async def test_what_comes_later_is_filled_while_nobody_says_anything(tokenizer: Any) -> None:
    server = engine(tokenizer)
    first = asyncio.create_task(collect(server, ask("a", 100, 10)))
    await asyncio.sleep(0.5)
    second = await collect(server, ask("b", 200, 2, first=500))
    assert times(second | await first) == {"a": [0.0, 1.2], "b": [0.5, 0.8]}


async def test_a_batch_that_is_filled_shares_nothing_with_the_one_just_before_it(tokenizer: Any) -> None:
    """SGLang admits the next batch before it looks at what it has just computed."""
    server, asked = engine(tokenizer), []
    for number in range(3):
        asked.append(asyncio.create_task(collect(server, ask(f"r{number}", 100, 10))))
        await asyncio.sleep(0.04)  # while the first is filled
    answers = await asyncio.gather(*asked, collect(server, ask("r3", 100, 10)))
    assert [chunks[0][1].cached_tokens for answer in answers for chunks in answer.values()] == [0, 0, 0, 99]


async def test_who_does_not_fit_is_tried_again_when_somebody_has_left(tokenizer: Any) -> None:
    """What is kept free for the others falls with each step, and SGLang does not look at that."""
    server = engine(tokenizer, 200, said=60)
    first = asyncio.create_task(collect(server, ask("a", 60, 60)))
    short = asyncio.create_task(collect(server, ask("b", 10, 10, first=1000)))
    await asyncio.sleep(0)
    later = await collect(server, ask("c", 40, 40, first=2000))
    at = times(later | await first | await short)
    assert at["c"][0] == at["b"][-1] < at["a"][-1]


def test_a_session_s_next_turn_fills_only_what_is_new_until_the_session_has_ended(tokenizer: Any) -> None:
    async def main(*, sessions: bool, ends: bool) -> list[int]:
        server, cached = engine(tokenizer, 400, sessions=sessions), []
        said = as_ids(range(100, 110))
        await collect(server, ask("a", 100, 10, session="s"))
        if ends:
            server.end_sessions(["s"])
        for number, prompt in enumerate((200, 150)):
            await collect(server, ask(f"other {number}", prompt, 10, first=1000 * (1 + number)))
        again = Request("b", as_ids(range(100)) + said + as_ids([7]), SamplingParams(1, ignore_eos=True), session="s")
        cached.append((await collect(server, again))["b"][0][1].cached_tokens)
        cached.append(server.evicted_tokens)
        return cached

    assert run_virtual(main(sessions=True, ends=False)) == [110, 210], "the first of the others made room"
    assert run_virtual(main(sessions=True, ends=True)) == run_virtual(main(sessions=False, ends=False))
    assert run_virtual(main(sessions=True, ends=True))[0] == 0


@pytest.mark.parametrize("tokens", [60, 100, 400])
async def test_however_small_the_memory_is_all_is_said_and_no_more_is_kept_than_there_is_room_for(
    tokenizer: Any, tokens: int
) -> None:
    server = engine(tokenizer, tokens, said=30)
    loads: list[Load] = []
    found: dict[str, list[tuple[float, Chunk]]] = {}
    async for chunk in server.generate([ask(f"r{i}", 20, 30, first=1000 * i) for i in range(8)]):
        found.setdefault(chunk.request_id, []).append((0.0, chunk))
        loads.append(server.load())
    answers = found
    assert [sum(len(chunk.ids) for _, chunk in answers[f"r{i}"]) for i in range(8)] == [30] * 8
    assert all(load.used_tokens + load.cached_tokens <= load.capacity == tokens for load in loads)
    assert max(load.running for load in loads) == {60: 1, 100: 2, 400: 8}[tokens]


async def test_who_has_said_least_is_taken_back_when_there_is_no_room_for_another_token(tokenizer: Any) -> None:
    """SGLang counts on seven tenths of what may be said, so all that may be said can be more than there is room for."""
    server = engine(tokenizer, 200, said=60)
    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(collect(server, ask(f"r{number}", 10, 60, first=1000 * number))))
        await asyncio.sleep(0.1)
    ends = {
        name: each[-1]
        for name, each in times(
            {name: chunks for answer in await asyncio.gather(*tasks) for name, chunks in answer.items()}
        ).items()
    }
    assert server.counts.retracted == 1
    assert server.counts.filled > server.counts.prompts == 30
    assert max(ends, key=lambda name: ends[name]) == "r2"


def test_new_weights_have_everything_filled_again(tokenizer: Any) -> None:
    async def main() -> tuple[list[float], int]:
        server = engine(tokenizer)
        task = asyncio.create_task(collect(server, ask("a", 100, 10)))
        await asyncio.sleep(0.55)  # five tokens are said, and half a step has gone
        await server.update_weights({})
        (chunks,) = times(await task).values()
        return chunks, server.counts.filled

    chunks, filled = run_virtual(main())
    assert filled == 100 + 105
    assert chunks == [0.0, 1.055]
