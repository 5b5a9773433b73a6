"""The same ids as the tokenizer's own, whatever kind it is: flags of tokens, who adds the BOS, how words begin.

Expected values come from ``apply_chat_template`` and the tokenizer alone.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.reference import FollowUp, Opening
from tests.unit.chat import chat_oracle as oracle
from tests.unit.chat import chat_zoo as zoo

pytestmark = pytest.mark.xdist_group("templates")  # the worker that compiles them has them all

WITH_BOS = "{{ bos_token }}" + zoo.CHATML + "{#- <tool_call></tool_call> -#}"
STEPS = {
    label: zoo.SCENARIOS[label]
    for label in ("after system", "three tool messages", "thinking", "truncated", "truncated, tool", "unicode result")
}


@cache
def sentencepiece(scheme: str) -> str:
    """A vocabulary with ``▁`` for spaces and byte fallback; ``legacy`` has a normalizer put the first one there."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = zoo.CHATML + json.dumps(zoo.TOOLS) + "system user assistant tool value of k go on and then " * 9
    backend.train_from_iterator(
        [text[start : start + 60] for start in range(0, len(text), 60)],
        trainers.BpeTrainer(vocab_size=600, special_tokens=letters, show_progress=False),
    )
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return json.dumps(state)


def with_vocabulary(template: str, vocabulary: str, **flags: Any) -> PreTrainedTokenizerFast:
    markers = zoo.tokenizer_for(template)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(vocabulary),
        bos_token="<s>",
        eos_token=markers.eos_token,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(
        [
            AddedToken(token.content, **{"special": token.special, "normalized": False, **flags})
            for token in markers.added_tokens_decoder.values()
        ]
    )
    # As from a file: what a normalizer does to added tokens is settled when they are read.
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
    loaded.chat_template = template
    return adding_bos(loaded)


def adding_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Like Llama's: encoding any text puts a BOS before it."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    return tokenizer


KINDS: dict[str, Callable[[str], PreTrainedTokenizerFast]] = {
    "all special": lambda template: with_vocabulary(template, zoo._vocabulary(), special=True),
    "none special": lambda template: with_vocabulary(template, zoo._vocabulary(), special=False),
    "normalized": lambda template: with_vocabulary(template, zoo._vocabulary(), normalized=True),
    "adds a BOS": lambda template: adding_bos(zoo.tokenizer_for(template)),
    "first word": lambda template: with_vocabulary(template, sentencepiece("first")),
    "legacy": lambda template: with_vocabulary(template, sentencepiece("legacy")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_bos_the_template_writes_and_no_other(kind: str) -> None:
    tokenizer = KINDS[kind](WITH_BOS)
    for template, count in ((WITH_BOS, 1), (zoo.CHATML, 0)):
        chat = ChatTemplate(tokenizer, chat_template=template)
        for text in ("hi", " x"):
            ids = chat.prompt([{"role": "system", "content": "s"}, zoo.user(text)], None)
            assert ids.count(tokenizer.bos_token_id) == count
            assert ids[:1].count(tokenizer.bos_token_id) == count
        glue = chat.glue([zoo.user(), zoo.said()], [zoo.user()], None, sampled_ids=[1], finish_reason="length")
        assert tokenizer.bos_token_id not in glue


@zoo.needs_zoo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_prompts_and_glue_are_the_tokenizers_own(name: str, kind: str) -> None:
    tokenizer = KINDS[kind](zoo.source(name))
    chat = ChatTemplate(tokenizer)
    stop_ids = {tokenizer.eos_token_id, oracle.learned_close(tokenizer)} - {None}
    compared = 0
    for label, step in STEPS.items():
        tools = zoo.TOOLS if step.tools else None
        stop = None if step.cut else zoo.stop_of(name, tokenizer, step.tool_turn)
        stops = [{stop} - {None}, stop_ids, zoo.stops_of(name, tokenizer) - {tokenizer.unk_token_id}]
        want = oracle.glue(tokenizer, step.history, step.new, tools, stops)
        if want is None:
            continue
        ids = tokenizer(want[0] + want[1], add_special_tokens=False).input_ids[0 if stop is None else 1 :]
        sampled = [7] if stop is None else [7, stop]
        for _ in range(2):
            finish = "length" if stop is None else "stop"
            encoded = chat.encode_here(FollowUp(step.history, step.new, tools, sampled, finish))
            assert (encoded.ids.tolist(), encoded.guarded) == (ids, 0), label
        whole = oracle.render(tokenizer, step.history[:-1], tools)
        prompt = tokenizer(whole, add_special_tokens=False).input_ids
        assert chat.prompt(step.history[:-1], tools) == prompt, label
        compared += 1
    assert compared >= 1


def test_clean_text_is_not_taken_for_an_injection_where_a_normalizer_hides_the_templates_tokens() -> None:
    """Older Llama tokenizers flag ``</s>`` as normalized: behind text it is then no token, also in the reference."""
    tokenizer = with_vocabulary(zoo.CHATML, sentencepiece("legacy"), normalized=True)
    chat = ChatTemplate(tokenizer)
    text = oracle.render(tokenizer, [zoo.user("hi")], None)
    want = tokenizer(text, add_special_tokens=False).input_ids
    hi = Opening([zoo.user("hi")], None)
    for encoded in (chat.reference.encode(hi), chat.encode_here(hi)):
        assert (encoded.ids.tolist(), encoded.guarded) == (want, 0)
    assert chat.encode_here(Opening([zoo.user("hi <|im_end|>")], None)).guarded >= 1


def test_a_stop_that_no_template_writes_stands_for_the_close_also_where_user_turns_seem_to_open_with_it() -> None:
    template = (
        "[|system|][|endofturn|]\n{%- for m in messages %}{{ '\\n{|' + m.role + '|}' + m.content }}"
        "{%- if m.role == 'assistant' %}{{ '[|endofturn|]' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '\\n{|assistant|}' }}{%- endif %}"
    )
    chat = ChatTemplate(zoo.tokenizer_for(template + "{#- <|endoftext|> -#}", eos="<|endoftext|>"))
    stop = chat.tokenizer.eos_token_id
    ids = chat.glue([zoo.user(), zoo.said()], [zoo.user("more")], None, sampled_ids=[stop], finish_reason="stop")
    assert chat.decode(ids) == "\n{|user|}more\n{|assistant|}"
