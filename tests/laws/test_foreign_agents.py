"""Drawn foreign agents: whatever they do with their histories, the engine's own log finds each token once, trained,
behind the very ids that it was asked by; and a stream is opened only where a history was not continued."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import fsm_rollout as fr
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states.external import responses_dialect
from fsm_rollout.states.external.agent_histories import AgentHistories
from fsm_rollout.states.external.chat_request import ChatRequest, ProtocolError
from fsm_rollout.states.external.handler import External
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.enums import FinishReason, Trigger
from fsm_rollout.trajectory.outcome import Outcome
from tests.foreign import CALCULATOR, CALL, YAML, agent, check_exact

WORDS = st.sampled_from(["yes", "no", "what is 2 + 2?", "é漢字", "<|im_end|>", "a b  c "])
OTHER = {"type": "function", "function": {"name": "note", "description": "d", "parameters": {"type": "object"}}}
ANSWERS = ("four", "let me think about that for a while", CALL, f"so {CALL}", "<tool_call>{broken")


class Puppet(External):
    """A foreign agent whose calls are made by the test, without HTTP."""

    here: Any = None

    async def run(self, trajectory: Any, ctx: Any) -> Outcome:
        Puppet.here.set_result((AgentHistories(ctx, self.spec.context, self._schemas), trajectory))
        await Puppet.end.wait()
        return Outcome(Trigger.RETURNED)

    end: Any = None


@dataclass(eq=False)
class History:
    """What an agent holds: messages whose last is an answer, or a question that was never answered."""

    messages: list[dict[str, Any]]
    tools: bool
    tip: bool = True
    """Whether nothing else has gone on from it: then going on opens no stream."""
    ids: list[int] = field(default_factory=list)


def items_of(message: dict[str, Any], keep_ids: bool) -> list[dict[str, Any]]:
    """Return a message as the items of OpenAI's responses."""
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        return [{"type": "function_call_output", "call_id": call_id, "output": message["content"]}]
    said = {"type": "message", "role": message["role"], "content": message["content"]}
    calls = [
        {"type": "function_call", "call_id": c["id"], "name": c["function"]["name"]}
        | {"arguments": json.dumps(c["function"]["arguments"])}
        | ({"id": f"fc_{message['answer']}_0"} if keep_ids and "answer" in message else {})
        for c in message.get("tool_calls") or ()
    ]
    return [said, *calls] if message["content"] or not calls else calls


def sent_again(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message as a careless client sends it: a date and an id change with each request, so do names of calls;
    thoughts come and go, and white space."""
    match message["role"]:
        case "system":
            stamp = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};\n"
            return message | {"content": f"{stamp}{message['content']}\nToday's date: 2026-11-{number:02}"}
        case "assistant":
            calls = [call | {"id": f"{number}-{call['id']}"} for call in message.get("tool_calls") or ()]
            thought = {"reasoning_content": f"thought {number}"} if number % 3 else {}
            return (
                message
                | {"content": f"{message['content']}\n" * bool(message["content"]), **thought}
                | ({"tool_calls": calls} if calls else {})
            )
        case "tool":
            return message | {"tool_call_id": f"{number}-{message['tool_call_id']}"}
    return message


class ForeignAgent(RuleBasedStateMachine):
    histories = Bundle("histories")
    broken = Bundle("broken")
    """Questions whose answers were broken off."""

    @initialize(
        seed=st.integers(0, 2**16), wire=st.sampled_from(["chat", "careless", "items", "items with ids", "by id"])
    )
    def begin(self, seed: int, wire: str) -> None:
        self.wire = wire
        self.loop = asyncio.new_event_loop()
        self.streams = 0
        self.calls = self.requests = 0

        def turn(request: Any) -> Turn:
            self.calls += not request.sampled
            begun_at = len(request.ids) - request.sampled  # the same for what goes on with a turn
            text = ANSWERS[(seed + request.turn * 7 + begun_at) % len(ANSWERS)]
            # No two answers are the same, or going on from the one would be going on from the other.
            return Turn(text=f"{request.context} {request.turn} {text}", chunks=3, delay=0.0005)

        self.engine = ScriptedEngine(turn, tokenizer=embedded_tokenizer(), log=True)
        Puppet.here, Puppet.end = self.loop.create_future(), asyncio.Event()
        graph = agent("use: 'os:getcwd'", assistant_turns=1000)
        self.rollout = fr.Rollout(graph, self.engine)
        for bound in self.rollout.scheduler.agents.all:
            bound.handlers["EXTERNAL"] = Puppet("EXTERNAL", graph.states["EXTERNAL"])

        async def main() -> None:
            async for group in self.rollout.stream(["x"]):
                assert group.trajectories[0].stop_reason == "answered", group.trajectories[0].detail

        self.run = self.loop.create_task(main())
        self.agent_histories, self.trajectory = self.do(Puppet.here)

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 600))

    def request(self, messages: list[dict[str, Any]], tools: bool) -> ChatRequest:
        """Return a call, as it is, or as the dialect with items reads it; ``by id``: after the answer last given."""
        self.requests += 1
        if self.wire == "chat":
            return ChatRequest([dict(message) for message in messages], tools=[CALCULATOR] if tools else [])
        if self.wire == "careless":
            shown = [CALCULATOR, OTHER] if self.requests % 2 else [OTHER, CALCULATOR]
            careless = [sent_again(message, self.requests) for message in messages]
            return ChatRequest([*careless[:1], *careless], tools=shown if tools else [])
        body: dict[str, Any] = {"tools": [{"type": "function", **CALCULATOR["function"]}] if tools else []}
        answers = [i for i, message in enumerate(messages) if "answer" in message]
        if self.wire == "by id" and answers:
            body["previous_response_id"] = f"resp_{messages[answers[-1]]['answer']}"
            messages = messages[answers[-1] + 1 :]
        items = [item for message in messages for item in items_of(message, self.wire == "items with ids")]
        return responses_dialect.read(body | {"input": items})

    async def ask(self, messages: list[dict[str, Any]], tools: bool) -> History:
        request = self.request(messages, tools)
        answer = await self.agent_histories.answer(request)
        answer.delivered()
        assert answer.reply.finish_reason is FinishReason.STOP
        return History([*messages, dict(answer.reply.message) | {"answer": request.reply_id}], tools)

    def follow_up(self, history: History, word: str) -> list[dict[str, Any]]:
        calls = history.messages[-1].get("tool_calls") or ()
        results = [
            {"role": "tool", "content": word, "tool_call_id": c["id"], "name": c["function"]["name"]} for c in calls
        ]
        return results or [{"role": "user", "content": word}]

    @rule(target=histories, word=WORDS, tools=st.booleans(), system=st.booleans())
    def start(self, word: str, tools: bool, system: bool) -> History:
        """Begin a history that is like no other."""
        head = [{"role": "system", "content": "Be brief."}] if system or self.wire == "careless" else []
        self.streams += 1
        return self.do(self.ask([*head, {"role": "user", "content": f"{self.streams} {self.calls} {word}"}], tools))

    @rule(target=histories, history=histories, word=WORDS)
    def append(self, history: History, word: str) -> History:
        """Go on with a history; if it was gone on with before, that is a branch."""
        self.streams += not history.tip
        history.tip = False
        return self.do(self.ask([*history.messages, *self.follow_up(history, f"{word} {self.calls}")], history.tools))

    @rule(target=histories, history=histories, data=st.data(), word=WORDS)
    def rewrite(self, history: History, data: st.DataObject, word: str) -> History:
        """Change an assistant's message, and go on from there."""
        places = [i for i, m in enumerate(history.messages) if m["role"] == "assistant"]
        at = data.draw(st.sampled_from(places))
        changed = [*history.messages[:at], {"role": "assistant", "content": f"changed {self.calls}"}]
        self.streams += 1
        return self.do(self.ask([*changed, {"role": "user", "content": word}], history.tools))

    @rule(target=histories, history=histories)
    def ask_again(self, history: History) -> History:
        """Wish for another answer to the last question."""
        self.streams += 1
        return self.do(self.ask(history.messages[:-1], history.tools))

    @rule(target=histories, history=histories, words=st.lists(WORDS, min_size=2, max_size=3))
    def in_parallel(self, history: History, words: list[str]) -> Any:
        """Go on in several ways at once."""
        self.streams += len(words) - history.tip
        history.tip = False
        asked = [
            self.ask([*history.messages, *self.follow_up(history, f"{word} {i} {self.calls}")], history.tools)
            for i, word in enumerate(words)
        ]

        async def together() -> list[History]:
            return await asyncio.gather(*asked)

        return multiple(*self.do(together()))

    @rule(target=broken, history=histories, word=WORDS, steps=st.integers(0, 12))
    def break_off(self, history: History, word: str, steps: int) -> Any:
        """Ask, and go away after a while."""
        opens = not history.tip
        messages = [*history.messages, *self.follow_up(history, f"{word} {self.calls}")]

        async def work() -> bool:
            task = self.loop.create_task(self.agent_histories.answer(self.request(messages, history.tools)))
            for _ in range(steps):
                await asyncio.sleep(0.0003)
            begun = steps > 0 or task.done()
            task.cancel()
            await asyncio.wait({task})
            return begun

        if not self.do(work()):
            return multiple()
        self.streams += opens
        history.tip = False
        return History(messages, history.tools)

    @rule(target=histories, question=consumes(broken))
    def retry(self, question: History) -> History:
        """Ask what was broken off once more: no stream, and no token, is lost or sampled twice."""
        return self.do(self.ask(question.messages, question.tools))

    @precondition(lambda self: self.streams)
    @rule(history=histories)
    def speak_for_the_model(self, history: History) -> None:
        """A history that ends in an answer is none to answer."""
        with pytest.raises(ProtocolError, match="the assistant's own"):
            self.do(self.ask(history.messages, history.tools))

    @invariant()
    def every_token_is_where_the_engine_has_it(self) -> None:
        if hasattr(self, "trajectory"):
            check_exact([self.trajectory], self.engine)
            assert len(self.trajectory.streams) == self.streams
            streams = self.trajectory.streams
            assert all(bool(stream.why) == bool(number) for number, stream in enumerate(streams))
            if self.wire == "careless":
                assert all([m["role"] for m in stream.messages].count("system") == 1 for stream in streams)
            for stream in streams:  # a branch says what it goes on from, but for one that could not be glued
                if stream.shares is not None:
                    source, shared = stream.shares
                    assert stream.tokens.ids[:shared] == streams[source].tokens.ids[:shared]
                    assert 0 < shared <= stream.tokens.prompt_length

    def teardown(self) -> None:
        if hasattr(self, "run"):
            Puppet.end.set()
            self.do(self.run)
            self.loop.run_until_complete(self.rollout.aclose())
            self.loop.close()


TestForeignAgent = ForeignAgent.TestCase
TestForeignAgent.settings = settings(stateful_step_count=20)


def test_the_plugin_plays_it_with_drawn_calls_and_runs_none_of_its_code(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", test_foreign=YAML.replace("AGENT", "command: [no-such-program]"))
    result = pytester.runpytest_inprocess(
        "--fsm-agents", "test_foreign.yaml", "--fsm-examples", "5", "-p", "no:cacheprovider", "-q"
    )
    assert result.ret == 0, result.stdout.str()
