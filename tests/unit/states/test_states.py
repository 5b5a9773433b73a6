"""What a visit promises: seeds of its own, calls made once, as many at once as it may make, a prompt's own bounds."""

import asyncio
from collections import Counter
from typing import Any, ClassVar

import pytest

from fsm_rollout.agent.graph import Context
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, SessionEnded, Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import FrozenMap, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import SINGLE, TOOLS, agent, changed, only, prompts, rows, run
from tests.unit.scheduler.test_handlers import custom

pytestmark = pytest.mark.virtual_time

HERE = "tests.unit.states.test_states"
MADE: Counter[str] = Counter()
"""The calls that were made, by what they were given."""
AT_ONCE: list[int] = [0, 0]
"""How many calls run now, and the most that ever did."""


async def work(text: str) -> str:
    """Take a second, or for ever.

    Args:
        text: What to say; `hang` never returns.
    """
    MADE[text] += 1
    AT_ONCE[0] += 1
    AT_ONCE[1] = max(AT_ONCE)
    try:
        await (asyncio.Event().wait() if text == "hang" else asyncio.sleep(1.0))
    finally:
        AT_ONCE[0] -= 1
    return text


TOLD = {"work": {"use": f"{HERE}:work"}}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MADE.clear()
    AT_ONCE[:] = [0, 0]


def test_no_two_contexts_share_their_randomness() -> None:
    graph = custom("Debate").model_copy(update={"contexts": FrozenMap({"left": Context(), "right": Context()})})
    left, right = run(graph, lambda request: Turn(text="one two"))[1].asked
    assert (left.context, right.context) == ("left", "right")
    assert left.sampling.seed != right.sampling.seed


class Asks(State):
    """Asks a judge twice."""

    triggers: ClassVar = ("said",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        for text in ("How was it?", "Really?"):
            await ctx.ask("policy", [{"role": "user", "content": text}])
        return Outcome("said")


class Begins(State):
    """Has not begun before."""

    triggers: ClassVar = ("said",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        assert ctx.resumed is False
        return Outcome("said")


class Scores:
    """A user who finds it middling and leaves."""

    async def reply(self, conversation: Conversation) -> Reply:
        return Reply(None, score=0.5, done=True)


def test_no_two_questions_share_their_randomness() -> None:
    first, second = run(custom("Asks", module=HERE), lambda request: "fine")[1].asked
    assert first.sampling.seed != second.sampling.seed


def test_a_visit_that_nothing_has_interrupted_is_not_resumed() -> None:
    assert only(run(custom("Begins", module=HERE), [])[0]).stop_reason == "said"


def test_a_user_s_score_is_that_of_the_turn_that_it_replies_to() -> None:
    """Not of what a critic said in a context of its own in between."""
    states = {
        "PENDING": {}, "GENERATING": {"timeout": 50.0},
        "CRITICIZING": {"handler": "generate", "context": "critic", "prompt": "Well?", "timeout": 50.0},
        "INTERACTING": {"timeout": 50.0},
    }  # fmt: skip
    lines = rows(
        "PENDING prompted GENERATING", "GENERATING generated CRITICIZING", "CRITICIZING generated INTERACTING",
        "INTERACTING interaction_done TERMINATED", "INTERACTING replied TERMINATED",
    )  # fmt: skip
    graph = agent(
        {"states": states, "transitions": lines}, interaction={"use": f"{HERE}:Scores"}, contexts={"critic": {}},
        limits={"assistant_turns": 2, "user_turns": 1},
    )  # fmt: skip
    groups, bench = run(graph, lambda request: f"says {request.context}")
    assert [request.context for request in bench.asked] == ["main", "critic"]
    assert only(groups).turn_scores == [(0, 0.5)]


def test_a_user_that_two_states_share_says_each_line_once() -> None:
    user = {"use": "fsm_rollout.interactions:ScriptedUser", "kwargs": {"turns": ["one", "two", "three"]}}
    talks = {"handler": "interact", "timeout": 50.0}
    states = {"PENDING": {}, "GENERATING": {"timeout": 50.0}, "INTERACTING": talks, "OTHER": talks}
    lines = rows(
        "PENDING prompted GENERATING", "GENERATING generated INTERACTING", "INTERACTING replied OTHER",
        "OTHER replied GENERATING", "INTERACTING interaction_done TERMINATED", "OTHER interaction_done TERMINATED",
    )  # fmt: skip
    graph = agent({"states": states, "transitions": lines}, interaction=user, limits={"user_turns": 9})
    heard = [m["content"] for m in only(run(graph, ["a", "b"])[0]).messages if m["role"] == "user"]
    assert heard[1:] == ["one", "two", "three"]


@pytest.mark.parametrize(("left", "reason"), [(5, "truncated"), (4, "truncated"), (3, "limit:response_tokens")])
def test_of_equal_bounds_the_turn_s_own_cuts_it(left: int, reason: str) -> None:
    short = changed(SINGLE, GENERATING={"sampling": {"max_tokens": 4}})
    graph = agent(short, limits={"assistant_turns": 1, "response_tokens": left})
    groups, _ = run(graph, ["one two three four five six"])
    assert (only(groups).response_tokens, only(groups).stop_reason) == (min(4, left), reason)


def test_no_two_turns_share_their_randomness_and_another_run_has_the_same() -> None:
    def seeds(**options: Any) -> list[int]:
        _, bench = run(agent(TOOLS, tools=TOLD), [call("work", "a"), "done"], n=2, **options)
        return [request.sampling.seed for request in bench.asked]

    assert len(set(seeds())) == 4
    assert seeds() == seeds()
    assert not set(seeds()) & set(seeds(seed=1))


def test_each_stream_of_a_context_is_a_session_of_its_own() -> None:
    """A prefix cache lets go of what nothing extends any more."""
    once_more = {"handler": "generate", "timeout": 100.0, "reset": True, "prompt": "Once more."}
    lines = ("PENDING prompted GENERATING", "GENERATING generated AGAIN", "AGAIN generated TERMINATED")
    twice = {"states": {**SINGLE["states"], "AGAIN": once_more}, "transitions": rows(*lines)}
    _, bench = run(agent(twice), ["one", "two"])
    heard = [line.what for line in bench.engine.log if isinstance(line.what, Request | SessionEnded)]
    assert [(type(what), what.session) for what in heard] == [
        (kind, f"p0/0/main/{stream}") for stream in (1, 2) for kind in (Request, SessionEnded)
    ]


def test_calls_that_an_earlier_visit_has_finished_are_not_made_again() -> None:
    """The first visit runs out of time with one of two calls done, and a row leads back to the state."""
    twice = {"timeout": 5.0, "max_visits": 2}
    frame = changed(TOOLS, "PROCESSING_TOOLS timed_out PROCESSING_TOOLS", PROCESSING_TOOLS=twice)
    graph = agent(frame, tools=TOLD)
    groups, _ = run(graph, [f"{call('work', 'a')}\n{call('work', 'hang')}", "done"])
    trajectory = only(groups)
    assert trajectory.visits["PROCESSING_TOOLS"] == 2
    assert dict(MADE) == {"a": 1, "hang": 1}
    assert trajectory.stop_reason == "answered"


@pytest.mark.parametrize(("parallel", "most", "seconds"), [(1, 1, 4.0), (2, 2, 2.0), (None, 4, 1.0)])
def test_so_many_calls_of_a_turn_run_at_once(parallel: int | None, most: int, seconds: float) -> None:
    frame = changed(TOOLS, PROCESSING_TOOLS={"timeout": 50.0, "parallel": parallel})
    turn = "\n".join(call("work", letter) for letter in "abcd")
    groups, _ = run(agent(frame, tools=TOLD), [turn, "done"])
    assert AT_ONCE[1] == most
    assert only(groups).tool_seconds == seconds


@pytest.mark.parametrize(
    ("own", "of_the_prompt", "asks"), [(3, 50, 3), (50, 3, 3), (None, 3, 3), (3, None, 3), (4, 4, 4)]
)
def test_a_prompt_lowers_max_tokens_and_never_raises_it(own: int | None, of_the_prompt: int | None, asks: int) -> None:
    frame = changed(SINGLE, GENERATING={"sampling": {"max_tokens": own}})
    listed = prompts(sampling=Sampling(max_tokens=of_the_prompt, temperature=0.5))
    (request,) = run(agent(frame), ["one two three four five six"], listed)[1].asked
    assert (request.sampling.max_tokens, request.sampling.temperature) == (asks, 0.5)


def test_a_turn_that_stops_without_a_stop_token_is_closed_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a server stops at a text: the token that closes the turn is nobody's sample."""
    emit = ScriptedEngine._emit

    def without_stop_token(
        engine: ScriptedEngine, answer: Any, ids: Any = NO_IDS, logprobs: Any = NO_LOGPROBS, **end: Any
    ) -> None:
        count = len(ids) - (len(ids) > 0 and ids[-1] in engine.eos_ids)
        emit(engine, answer, ids[:count], logprobs[:count], **end)

    monkeypatch.setattr(ScriptedEngine, "_emit", without_stop_token)
    groups, bench = run(agent(TOOLS, tools=TOLD), [f"{call('work', 'a')} now", "done"])
    (stream,) = only(groups).streams
    assert only(groups).stop_reason == "answered"
    turn, glue = stream.tokens.spans[1:3]
    assert stream.tokens.ids[turn.end - 1] not in bench.engine.eos_ids
    assert stream.tokens.ids[glue.start] in bench.engine.eos_ids
    assert (turn.state, glue.state) == ("GENERATING", "PROCESSING_TOOLS")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut within the string"])
def test_a_turn_ends_at_a_stop_string_which_stays_in_it(cut: bool) -> None:
    """The string is found across a cut, what the engine says further is dropped, and the template closes the turn."""
    said = f"{call('work', 'a')} <answer>5</answer> and more"
    at = said.index("wer> and") if cut else len(said)
    turns = [Turn(text=text, chunks=9, delay=1.0) for text in (said[:at], said[at:]) if text]
    sampling = {"stop": ["</answer>", "\n\n"], "max_tokens": len(tokenizer().encode(said[:at]))}
    frame = changed(TOOLS, "GENERATING truncated GENERATING", GENERATING={"sampling": sampling})
    groups, bench = run(agent(frame, tools=TOLD), [*turns, "done"])
    (stream,) = only(groups).streams
    assert only(groups).stop_reason == "answered"
    decode, spans = bench.engine.tokenizer.decode, stream.tokens.spans
    sampled = [span for span in stream.tokens.sampled() if span.turn < len(turns)]
    ids = [token for span in sampled for token in stream.tokens.ids[span.start : span.end]]
    assert decode(ids) == said.removesuffix(" and more")
    glue = spans[spans.index(sampled[-1]) + 1]
    assert stream.tokens.ids[glue.start] in bench.engine.eos_ids


def test_a_stream_says_which_tokens_are_whose_and_which_are_scaffold() -> None:
    """Prompt, sampled turn, tool result, cut turn that goes on: each token is one message's, or the template's own."""
    frame = changed(TOOLS, "GENERATING truncated GENERATING", GENERATING={"sampling": {"max_tokens": 60}})
    graph = agent(frame, tools=TOLD, limits={"assistant_turns": 4})
    groups, bench = run(graph, [call("work", "a result"), "word " * 70, "done"])
    (stream,) = only(groups).streams
    ids, decode = stream.tokens.ids, bench.engine.tokenizer.decode
    said: dict[int, str] = {}
    scaffold, end = "", 0
    for message, start, length, _ in stream.parts:
        scaffold += decode(ids[end:start])
        end = start + length
        said[message] = said.get(message, "") + decode(ids[start:end])
    scaffold += decode(ids[end:])
    assert [stream.messages[index]["role"] for index in said] == ["user", "assistant", "tool", "assistant"]
    assert said[0] == stream.messages[0]["content"]
    assert said[2] == stream.messages[2]["content"] == "a result"
    assert "".join(said[index] for index in (1, 3)) == "".join(
        decode(ids[span.start : span.end]) for span in stream.tokens.sampled()
    )
    assert scaffold.count("<|im_start|>") == 5


async def long_page(text: str) -> str:
    """Return a page of one token for each word.

    Args:
        text: How many words.
    """
    return "word " * int(text)


LONG = {"page": {"use": f"{HERE}:long_page"}}


@cases("states")
async def test_a_result_without_a_bound_of_its_own_leaves_half_of_what_is_left(
    limits: dict[str, int], calls: int, max_context: int, most: int
) -> None:
    """A page of 20,000 tokens is no fault of the policy's: the trajectory goes on, and the model is told of the cut."""
    turns = ["\n".join([call("page", "20000")] * calls), call("page", "12"), "done"]
    graph = agent(TOOLS, tools=LONG, limits={"assistant_turns": 6, "tool_calls": 6, "wall_seconds": 1000.0, **limits})
    engine = ScriptedEngine(turns, tokenizer=tokenizer(), max_context=max_context)
    scheduler = Scheduler({graph.agent: graph}, {"policy": EngineClient(engine)})
    trajectory = only([group async for group in scheduler.run(prompts(1), 1)])
    assert trajectory.stop_reason == "answered"
    first, second, _ = trajectory.assistant_turns
    before = first.tokens + (trajectory.streams[0].tokens.prompt_length if most in (550, 1_000) else 0)
    for called in first.results:
        length = len(tokenizer()(called.result, add_special_tokens=False)["input_ids"])
        allowed = max(64, most - before // (2 * calls))
        assert allowed - 8 <= length <= allowed
        assert f"…[{called.truncated_tokens:,} tokens cut]…" in called.result
    assert [(called.result, called.truncated_tokens) for called in second.results] == [("word " * 12, 0)]


async def test_a_generation_s_time_is_told_apart_from_its_wait() -> None:
    """From when it was asked for to its end, the first part of it until the engine took it."""
    graph, turn = agent(SINGLE), Turn(text="one two three", chunks=3, delay=2.0)
    engine = ScriptedEngine([turn], tokenizer=tokenizer())
    scheduler = Scheduler({graph.agent: graph}, {"policy": EngineClient(engine)})
    trajectory = only([group async for group in scheduler.run(prompts(1), 1)])
    assert (trajectory.queue_seconds, trajectory.generate_seconds) == (0.0, pytest.approx(6.0))
