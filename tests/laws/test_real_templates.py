"""Every template of the zoo in every scenario: what the derivation gives, or a refusal where it gives nothing."""

import asyncio
import json
from functools import cache

import pytest

from fsm_rollout.chat import ChatTemplate, Encoded, template
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.errors import ChatTemplateError
from tests.unit.chat import chat_oracle as oracle
from tests.unit.chat import chat_zoo as zoo

LARGE = "15 kB"
"""Seconds of work for templates that walk through a text by its characters; they have no answer to a short one."""
NO_ANSWER = {"template-raised", "message-dropped", "no-close-token", "turn-dropped", "text-moved"}

# Templates are compiled once: all tests of one follow each other, on one worker.
pytestmark = [zoo.needs_zoo, pytest.mark.xdist_group("templates")]


@pytest.fixture(scope="module", params=zoo.CASES)
def name(request: pytest.FixtureRequest) -> str:
    """A template of the zoo."""
    return str(request.param)


@cache
def chat_of(name: str) -> ChatTemplate:
    """One for all tests, as one serves all trajectories."""
    return ChatTemplate(zoo.tokenizer_of(name))


def test_glue_is_exact_or_refused_for_a_reason(name: str) -> None:
    check_glue(name, [label for label in zoo.SCENARIOS if label != LARGE])


def test_glue_of_a_large_result_is_exact(name: str) -> None:
    if check_glue(name, ["one tool message"]):
        assert check_glue(name, [LARGE]) == [LARGE]


def check_glue(name: str, labels: list[str]) -> list[str]:
    """Compare the glue in some scenarios with the oracle's; return those that have an answer."""
    answered = []
    tokenizer = zoo.tokenizer_of(name)
    vocabulary = tokenizer.get_vocab()
    chat = chat_of(name)
    learned = oracle.learned_close(tokenizer)
    stop_ids = {tokenizer.eos_token_id, learned} - {None}
    for label in labels:
        scenario = zoo.SCENARIOS[label]
        tools = zoo.TOOLS if scenario.tools else None
        stop = None if scenario.cut else zoo.stop_of(name, tokenizer, scenario.tool_turn)
        stops = [{stop} if stop is not None else set(), stop_ids, zoo.stops_of(name, tokenizer)]
        want = oracle.glue(tokenizer, scenario.history, scenario.new, tools, stops)
        arguments = {
            "sampled_ids": [7] if stop is None else [7, stop],
            "finish_reason": "length" if stop is None else "stop",
        }
        if want is None:
            with pytest.raises(ChatTemplateError) as refusal:
                chat.glue(scenario.history, scenario.new, tools, **arguments)
            assert refusal.value.rule in NO_ANSWER, (label, refusal.value)
            continue
        answered.append(label)
        close, text = want
        whole = text if stop is not None else close + text
        # From the reference, which the cache learns from, and from the cache; a large text once, as it comes.
        asked = FollowUp(scenario.history, scenario.new, tools, **arguments)
        got = chat.encode_here(asked)
        if label != LARGE:
            assert chat.encode_here(asked) == got, label
            if got.entry is not None:  # learned in another scenario
                assert chat.reference.encode(asked) == got, label
        assert chat.decode(got.ids) == whole, label
        check_parts(chat, got, scenario.new)
        canonical = tokenizer(whole, add_special_tokens=False).input_ids
        injected = zoo.MARKERS.findall("".join(message["content"] for message in scenario.new))
        foreign = [marker for marker in injected if marker in vocabulary]
        assert (got.guarded > 0) == bool(foreign), label
        assert (got.ids.tolist() == canonical) == (not foreign), label
    return answered


def check_parts(chat: ChatTemplate, encoded: Encoded, messages: list[dict[str, str]]) -> None:
    """Parts and scaffold make up the ids; each part is a message's text, as it is but for the edges, or as JSON."""
    written: dict[int, list[str]] = {index: [] for index in range(len(messages))}
    end = 0
    for index, start, length, _ in encoded.parts:
        assert end <= start < start + length <= len(encoded.ids)
        end = start + length
        written[index].append(chat.decode(encoded.ids[start:end]))
    whole = chat.decode(encoded.ids)
    for index, message in enumerate(messages):
        content = message["content"]
        forms = [content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))]
        assert all(any(text in form for form in forms) for text in written[index]), (content, written[index])
        if message["role"] not in ("assistant", "system") and len(content) > 8 and content in whole:
            assert max(map(len, written[index]), default=0) >= len(content) - 4, (content, written[index])


def test_prompts_are_those_of_apply_chat_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "LONG_TEXT", 0)  # for what is not encoded "here"
    tokenizer = zoo.tokenizer_of(name)
    chat = chat_of(name)
    system = {"role": "system", "content": "be  brief\n"}
    for messages in (
        [zoo.user()],
        [system, zoo.user(zoo.UNICODE)],
        [system, zoo.user(" x "), zoo.said(), zoo.user()],
        [system, system, zoo.user(" x "), zoo.user(zoo.UNICODE)],
    ):
        for tools in (None, zoo.TOOLS):
            try:
                text = oracle.render(tokenizer, messages, tools)
                shown = oracle.render(tokenizer, [{**m, "content": f"n5Kw{i}"} for i, m in enumerate(messages)], tools)
            except Exception:
                with pytest.raises(ChatTemplateError):
                    chat.prompt(messages, tools)
                continue
            if any(f"n5Kw{i}" not in shown for i, message in enumerate(messages) if message["role"] != "assistant"):
                with pytest.raises(ChatTemplateError) as refusal:
                    chat.prompt(messages, tools)
                assert refusal.value.rule == "message-dropped"
                continue
            want = tokenizer(text, add_special_tokens=False).input_ids
            assert chat.reference.encode(Opening(messages, tools)).ids.tolist() == want
            # In the thread of long texts it is learned from the second prompt what the third begins with.
            *_, aside = [
                asyncio.run(chat.encode(Opening([*messages[:-1], last], tools)))
                for last in (zoo.user("one"), zoo.user("another"), messages[-1])
            ]
            for encoded in (aside, *(chat.encode_here(Opening(messages, tools)) for _ in range(2))):
                assert encoded.ids.tolist() == want
                check_parts(chat, encoded, messages)


def test_most_of_the_zoo_is_served_by_the_cache_and_the_stateful_ones_are_not() -> None:
    """Which templates depend on history is found out, not listed; here is what was found."""
    served: dict[str, bool] = {}
    for name in zoo.NAMES:
        tokenizer = zoo.tokenizer_of(name)
        chat = chat_of(name)
        step = zoo.SCENARIOS["user follow-up"]
        stop = zoo.stop_of(name, tokenizer, False)
        try:
            chat.glue(step.history, step.new, None, sampled_ids=[stop], finish_reason="stop")
        except ChatTemplateError:
            continue
        again = chat.encode_here(FollowUp(step.history, step.new, None, sampled_ids=[stop], finish_reason="stop"))
        served[name] = again.entry is not None
    slow = {name for name, fast in served.items() if not fast}
    assert len(served) > 0.84 * len(zoo.NAMES)
    assert len(slow) <= len(zoo.NAMES) // 10
    assert all("deepseek" in name or "mistral" in name or "command" in name or "pixtral" in name for name in slow), slow
