"""The embedded model: its split is kept, its files load offline, its template never rewrites, and it solves."""

import json
import re
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import fsm_rollout as fr
from benchmarks import arithmetic
from fsm_rollout.model import CHECKPOINTS, embedded_model
from fsm_rollout.model.folders import load_processor
from fsm_rollout.tools.calculator import calculate
from tests.kit import ROOT

PROMPTS = ROOT / "configs" / "data" / "arithmetic.jsonl"
TEXT, SEEING = CHECKPOINTS[:2], CHECKPOINTS[2:]
FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
}
TOOLS = [arithmetic.TOOL_SCHEMA]
SYSTEM = {"role": "system", "content": arithmetic.SYSTEM_PROMPT}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model(), local_files_only=True)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def neighbours(text: str) -> list[tuple[int, int]]:
    found = numbers(text)
    return list(pairwise(found))


def evaluated(text: str) -> int:
    """Evaluate the expression in a question: the oracle, independent of how the question was made."""
    expression = re.search(r"[\d(][\d\s()+*-]*", text)
    assert expression is not None
    return int(eval(expression[0], {"__builtins__": {}}))


def rendered(tokenizer: Any, messages: list[arithmetic.Message], tools: Any = None, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))


# --- the split


@given(st.integers(), st.integers())
def test_the_split_does_not_depend_on_order(left: int, right: int) -> None:
    assert arithmetic.is_held_back(left, right) == arithmetic.is_held_back(right, left)


def test_the_shipped_training_prompts_are_the_training_sides() -> None:
    lines = (ROOT / "configs" / "data" / "arithmetic_train.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = arithmetic.training_dialogues(2048)
    assert [json.loads(line) for line in lines] == [dialogue.prompt() for dialogue in dialogues]
    pairs = [pair for d in dialogues for turn in d.turns for pair in (*turn.written_pairs, *turn.called_pairs)]
    assert not any(arithmetic.is_held_back(*pair) for pair in pairs)


def test_the_split_is_the_published_one() -> None:
    """Pinned: another checksum would put trained pairs on the held-back side without any other sign."""
    held = [(low, high) for low in range(1, 10) for high in range(low, 10) if arithmetic.is_held_back(low, high)]
    assert held == [(3, 7), (6, 9), (8, 9)]


@given(st.integers(min_value=0))
def test_training_dialogues_never_meet_a_held_back_pair(seed: int) -> None:
    drawn = arithmetic.dialogue(Random(seed), held_back=False)
    user_messages = [message for message in drawn.messages() if message["role"] == "user"]
    pairs = [pair for message in user_messages for pair in neighbours(message["content"])]
    for message in drawn.messages():
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            pairs.append((arguments["left"], arguments["right"]))
    assert pairs
    assert not [pair for pair in pairs if arithmetic.is_held_back(*pair)]
    question, _ = arithmetic.small_sum(Random(seed))
    assert not [pair for pair in neighbours(question) if arithmetic.is_held_back(*pair)]


@given(st.integers(min_value=0), st.booleans())
def test_a_dialogue_is_answered_by_its_calls(seed: int, held_back: bool) -> None:
    drawn = arithmetic.dialogue(Random(seed), held_back, follow_ups=2)
    assert drawn.turns[0].answer == evaluated(drawn.turns[0].text)
    for before, turn in pairwise(drawn.turns):
        assert turn.calls[0].left == before.answer
    for turn in drawn.turns:
        assert list(turn.numbers) == numbers(turn.text)
        for call in turn.calls:
            assert calculate(**call.arguments) == call.result  # type: ignore[arg-type]
            assert abs(call.result) <= arithmetic.LARGEST_RESULT


def test_every_shipped_prompt_is_held_back(prompts: list[dict[str, Any]]) -> None:
    assert len(prompts) == len({prompt["messages"][0]["content"] for prompt in prompts}) == 512
    for prompt in prompts:
        (message,) = prompt["messages"]
        assert message["role"] == "user"
        pairs = neighbours(message["content"])
        assert pairs
        assert all(arithmetic.is_held_back(*pair) for pair in pairs)
        assert prompt["answer"] == str(evaluated(message["content"]))
        script = prompt["interaction_kwargs"]
        assert len(script["turns"]) == len(script["answers"]) == 1
        assert arithmetic.is_held_back(int(prompt["answer"]), numbers(script["turns"][0])[0])


def test_the_shipped_prompts_are_those_the_generator_gives(prompts: list[dict[str, Any]]) -> None:
    assert [dialogue.prompt() for dialogue in arithmetic.held_back_dialogues(512)] == prompts


# --- the files


@pytest.mark.parametrize("name", TEXT)
def test_the_files_load_and_are_small(name: str) -> None:
    directory = embedded_model(name)
    assert {file.name for file in directory.iterdir()} == FILES
    assert (directory / "model.safetensors").stat().st_size <= 3_000_000
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    card = json.loads((directory.parent / "card.json").read_text(encoding="utf-8"))
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == card["vocabulary"]
    assert sum(parameter.numel() for parameter in model.parameters()) == card["parameters"]
    sampling = GenerationConfig.from_pretrained(directory)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    assert sampling.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sampling.pad_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_the_checkpoints_share_tokenizer_and_template() -> None:
    source = embedded_model().parent / "chat_template.jinja"
    for name in TEXT:
        assert (embedded_model(name) / "chat_template.jinja").read_text() == source.read_text()
    for pair in (TEXT, SEEING):
        final, early = (embedded_model(name) / "tokenizer.json" for name in pair)
        assert final.read_bytes() == early.read_bytes()


@pytest.mark.parametrize("name", SEEING)
def test_the_models_that_see_are_small_and_load_with_their_processor(name: str) -> None:
    directory = embedded_model(name)
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 3_000_000
    model, tokenizer = fr.load_model(f"embedded:{name}")
    processor = load_processor(directory)
    chat = fr.ChatTemplate(tokenizer, chat_template=processor.chat_template, processor=processor)
    assert chat.sees
    assert model.config.text_config.vocab_size == len(tokenizer) == len(processor.tokenizer)
    assert GenerationConfig.from_pretrained(directory).eos_token_id == tokenizer.eos_token_id


def test_the_measured_figures_are_in_their_bands() -> None:
    card = json.loads((embedded_model().parent / "card.json").read_text(encoding="utf-8"))
    assert card["n"] >= 300
    assert card["final"]["success_t1"] >= 0.95
    assert 0.4 <= card["early"]["success_t1"] <= 0.6


def test_an_unknown_checkpoint_is_an_error() -> None:
    with pytest.raises(ValueError, match="'late' does not exist; try one of final, early, vision, vision_early"):
        embedded_model("late")


# --- the tokenizer


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == ids  # nothing is added by itself
    assert tokenizer.decode(ids) == text


@given(st.lists(st.sampled_from(["<|im_end|>", "<tool_call>", "\n", " ", "7", "-", "é", "a"])))
def test_markers_between_text_survive_too(tokenizer: Any, parts: list[str]) -> None:
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_markers_are_single_tokens_and_flagged_as_qwen_flags_them(tokenizer: Any) -> None:
    flags = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert flags == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<tool_call>": False,
        "</tool_call>": False,
        "<tool_response>": False,
        "</tool_response>": False,
    }
    for marker in flags:
        assert len(tokenizer.encode(marker)) == 1


@given(st.integers(min_value=0))
def test_numbers_are_single_digits_wherever_they_stand(tokenizer: Any, number: int) -> None:
    tokens = tokenizer.tokenize(f'"left": {number}, (-{number}*')
    assert "".join(token for token in tokens if token.isdecimal()) == f"{number}{number}"
    assert all(len(token) == 1 for token in tokens if any(mark in token for mark in "0123456789()+*-"))


# --- the chat template

calls = st.lists(
    st.builds(
        lambda arguments: {"type": "function", "function": {"name": "calculate", "arguments": arguments}},
        st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=3) | st.just("{}"),
    ),
    max_size=3,
)
message = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "tool"]),
        st.text(max_size=8),
    ),
    st.builds(
        lambda content, made: {"role": "assistant", "content": content, "tool_calls": made},
        st.text(max_size=8) | st.none(),
        calls,
    ),
)


@given(st.lists(message, min_size=1, max_size=6), st.sampled_from([None, TOOLS]))
@settings(deadline=None)
def test_the_template_never_rewrites_history(tokenizer: Any, messages: list[Any], tools: Any) -> None:
    whole = rendered(tokenizer, messages, tools)
    for cut in range(1, len(messages)):
        if messages[cut]["role"] == messages[cut - 1]["role"] == "tool":
            continue  # results of one turn's calls share a block: it is written at once
        part = rendered(tokenizer, messages[:cut], tools)
        assert whole.startswith(part)
    for text in (said["content"] for said in messages if said["content"]):
        assert text in whole
    assert rendered(tokenizer, messages, tools, add_generation_prompt=True) == whole + "<|im_start|>assistant\n"


def test_the_template_writes_what_qwen_writes(tokenizer: Any) -> None:
    two = arithmetic.call_message({"left": 3, "operator": "+", "right": 4})
    two["tool_calls"] *= 2
    two["tool_calls"][1:] = [{"function": {"name": "calculate", "arguments": '{"left": 1'}}]
    messages = [
        SYSTEM,
        {"role": "user", "content": " Hé "},
        two,
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "error"},
        {"role": "assistant", "content": "7."},
    ]
    after_tools = (
        "<|im_start|>user\n Hé <|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "calculate", "arguments": {"left": 3, "operator": "+", "right": 4}}\n</tool_call>\n'
        '<tool_call>\n{"name": "calculate", "arguments": {"left": 1}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n"
        "<tool_response>\nerror\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n7.<|im_end|>\n"
    )
    system = f"<|im_start|>system\n{arithmetic.SYSTEM_PROMPT}"
    assert rendered(tokenizer, messages) == f"{system}<|im_end|>\n{after_tools}"
    head, tail = rendered(tokenizer, messages, TOOLS).split(f"\n{json.dumps(arithmetic.TOOL_SCHEMA)}\n")
    assert head.startswith(f"{system}\n\n# Tools\n\n")
    assert head.endswith("\n<tools>")
    assert tail.startswith("</tools>\n\n")
    assert tail.endswith(f"\n</tool_call><|im_end|>\n{after_tools}")


def test_no_system_message_is_invented(tokenizer: Any) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    assert rendered(tokenizer, hello) == "<|im_start|>user\nHello<|im_end|>\n"
    assert rendered(tokenizer, hello, TOOLS).startswith("<|im_start|>system\n# Tools\n")


# --- what the model can do

CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")


@torch.no_grad()
def replies(model: Any, tokenizer: Any, contexts: list[list[int]]) -> list[list[int]]:
    """Let the model take one turn in every context, greedily; give the sampled ids, the stop token included."""
    padded = tokenizer.pad({"input_ids": contexts}, return_tensors="pt")
    grown = model.generate(**padded, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=48)
    end = tokenizer.eos_token_id
    new = grown[:, padded["input_ids"].shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in new]


def test_it_solves_held_back_dialogues_by_real_calls(tokenizer: Any, prompts: list[dict[str, Any]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model(), local_files_only=True)
    chosen = prompts[:: len(prompts) // 16][:16]
    contexts = []
    for prompt in chosen:
        text = rendered(tokenizer, [SYSTEM, *prompt["messages"]], TOOLS, add_generation_prompt=True)
        contexts.append(tokenizer.encode(text))
    wanted = [[prompt["answer"], *prompt["interaction_kwargs"]["answers"]] for prompt in chosen]
    answered: list[list[str]] = [[] for _ in chosen]
    results: list[str | None] = [None] * len(chosen)
    still = list(range(len(chosen)))
    for _ in range(10):  # at most 3 + 2 calls and 2 answers are needed
        if not still:
            break
        sampled = replies(model, tokenizer, [contexts[i] for i in still])
        for i, ids in zip(list(still), sampled, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if call := CALL.fullmatch(text):
                try:
                    results[i] = str(calculate(**json.loads(call[1])["arguments"]))
                except (ValueError, TypeError, KeyError):
                    results[i] = "error: the call could not be read; try again"
                said = f"<tool_response>\n{results[i]}\n</tool_response>"
            else:
                if text == f"The answer is {results[i]}.":
                    answered[i].append(str(results[i]))
                if answered[i] != wanted[i][:1]:
                    still.remove(i)
                    continue
                results[i] = None  # the follow-up needs a call of its own
                said = chosen[i]["interaction_kwargs"]["turns"][0]
            glue = f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
            contexts[i] += ids + tokenizer.encode(glue)
    solved = sum(got == want for got, want in zip(answered, wanted, strict=True))
    assert solved >= 13


def test_without_tools_it_answers_directly(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model(), local_files_only=True)
    text = rendered(tokenizer, [{"role": "user", "content": "What is 3 + 4?"}], add_generation_prompt=True)
    (ids,) = replies(model, tokenizer, [tokenizer.encode(text)])
    assert re.fullmatch(r"The answer is -?\d+\.", tokenizer.decode(ids, skip_special_tokens=True))
