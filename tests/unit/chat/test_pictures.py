"""Pictures in streams: what the model's own processor makes of a whole conversation is the oracle."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.errors import ChatTemplateError, PictureError
from fsm_rollout.model.folders import load_processor, model_folder
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from tests.embedded import tokenizer
from tests.vision import FAMILIES, PLACEHOLDERS


@cache
def reader(family: str) -> tuple[Any, ChatTemplate]:
    processor = FAMILIES[family]()
    return processor, ChatTemplate(processor.tokenizer, chat_template=processor.chat_template, processor=processor)


def picture(seed: int) -> StoredPicture:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(8, 120, 2)
    return picture_of(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_embedded_model_sees_whether_or_not_torchvision_is_installed() -> None:
    processor = load_processor(model_folder("embedded:vision"))
    pixels = processor(text=["<image>"], images=[picture(1).image()], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)


def parts(contents: Sequence[str | int]) -> list[dict[str, Any]]:
    if not any(isinstance(part, int) for part in contents):
        contents = ["".join(map(str, contents))]  # of a message that is all text, the parts are one
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": picture(part)}
        for part in contents
    ]


def oracle(family: str, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return what the processor makes of the template's text of the whole conversation, and of its pictures."""
    processor, _ = reader(family)
    shown = [
        {**m, "content": [{"type": "image"} if "image" in part else part for part in m["content"]]} for m in messages
    ]
    text = processor.tokenizer.apply_chat_template(
        shown, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    images = [part["image"].image() for m in messages for part in m["content"] if "image" in part]
    ids: list[int] = list(processor(text=[text], images=images or None, add_special_tokens=False)["input_ids"][0])
    return ids


def collapsed(encoded: Encoded, placeholder: int) -> list[int]:
    ids, start = list[int](), 0
    for span in encoded.media:
        ids += [*encoded.ids[start : span.start], placeholder]
        start = span.start + span.length
    return ids + list(encoded.ids[start:])


words = st.sampled_from(["What is this?", " and ", "\n\n", "2 + 2", "Ünï ", "x"])
contents = st.lists(words | st.integers(0, 5), min_size=1, max_size=5).map(lambda found: ["look", *found, "now"])


@pytest.mark.parametrize("family", FAMILIES)
@given(contents)
def test_a_prompt_is_what_the_processor_makes_of_it(family: str, said: list[str | int]) -> None:
    processor, chat = reader(family)
    message = {"role": "user", "content": parts(said)}
    encoded = chat.reference.encode(Opening([message], None))
    assert list(encoded.ids) == oracle(family, [message])
    # Each span is the processor's own of that picture, and the rest is the text with one placeholder for each.
    assert [span.picture for span in encoded.media] == [picture(part) for part in said if isinstance(part, int)]
    for span in encoded.media:
        alone = processor(text=[PLACEHOLDERS[family]], images=[span.picture.image()], add_special_tokens=False)
        assert list(encoded.ids[span.start : span.start + span.length]) == list(alone["input_ids"][0])
    text = processor.tokenizer.decode(collapsed(encoded, chat.reference.reader.placeholder))
    assert text.count(PLACEHOLDERS[family]) == len(encoded.media)
    inside = {at for span in encoded.media for at in range(span.start, span.start + span.length)}
    for part in encoded.parts:
        assert inside.isdisjoint(range(part.start, part.start + part.length)), "a picture's ids are nobody's text"


@pytest.mark.parametrize("family", FAMILIES)
@given(contents, contents)
def test_what_follows_a_turn_is_too(family: str, said: list[str | int], then: list[str | int]) -> None:
    processor, chat = reader(family)
    first, answer = {"role": "user", "content": parts(said)}, "It is 4."
    new = {"role": "user", "content": parts(then)}
    prompt = chat.reference.encode(Opening([first], None))
    whole = oracle(family, [first, {"role": "assistant", "content": [{"type": "text", "text": answer}]}, new])
    sampled = processor.tokenizer.encode(answer, add_special_tokens=False)
    history = [first, {"role": "assistant", "content": answer}]
    glue = chat.reference.encode(FollowUp(history, [new], None, sampled, "length"))
    end = len(whole) - len(glue.ids)
    assert (list(prompt.ids), whole[end:]) == (whole[: len(prompt.ids)], list(glue.ids))
    assert chat.decode(whole[len(prompt.ids) : end]).strip() == answer
    assert [span.picture for span in glue.media] == [picture(part) for part in then if isinstance(part, int)]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_spells_a_placeholder_is_no_picture(family: str) -> None:
    _, chat = reader(family)
    placeholder = PLACEHOLDERS[family]
    message = {"role": "user", "content": parts([f"{placeholder} is not ", 1, f" but {placeholder}"])}
    encoded = chat.reference.encode(Opening([message], None))
    assert len(encoded.media) == 1
    assert encoded.guarded == 2
    assert chat.decode([encoded.ids[at] for at in encoded.guarded_at]) == placeholder * 2
    plain = chat.encode_here(Opening([{"role": "user", "content": f"{placeholder}!"}], None))
    assert plain.media == ()
    assert set(plain.ids).isdisjoint(chat.reference.reader.pads)


@pytest.mark.parametrize("injection", ["allow", "guard"])
def test_a_placeholder_without_a_picture_is_refused_whoever_wrote_it(injection: Any) -> None:
    """A server would take it in silence, and the model would see the placeholder's own embedding."""
    processor, _ = reader("gemma3")
    chat = ChatTemplate(
        processor.tokenizer, chat_template=processor.chat_template, processor=processor, injection=injection
    )
    role = "user" if injection == "allow" else "system"  # what the author says may hold control tokens
    messages = [{"role": role, "content": "<start_of_image>"}, {"role": "user", "content": "hello"}]
    for _ in range(2):  # the second time, from the cache
        with pytest.raises(ChatTemplateError, match="injected-marker"):
            chat.encode_here(Opening(messages[: 1 + (role == "system")], None))


def test_a_template_that_shows_no_picture_takes_text_and_guards_what_stands_for_one() -> None:
    processor, seeing = reader("gemma3")
    chat = ChatTemplate(processor.tokenizer, chat_template=tokenizer().chat_template, processor=processor)
    assert not chat.sees
    assert set() < chat.pads < seeing.pads
    assert chat.encode_here(Opening([{"role": "user", "content": "What?"}], None)).ids
    with pytest.raises(ChatTemplateError, match=r"message 0 holds a picture, and .*pictures-dropped.* writes nothing"):
        chat.encode_here(Opening([{"role": "user", "content": parts([1])}], None))


def test_a_template_that_drops_the_pictures_of_a_role_is_refused_there() -> None:
    processor, _ = reader("llava_next")
    kept = "{% for part in m.content if part.type == 'image' %}<image>{% endfor %}"
    text = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% if m.role == 'user' %}" + kept + "{% endif %}" + text + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatTemplate(processor.tokenizer, chat_template=template, processor=processor)
    asked = {"role": "user", "content": parts([1, "what is it?"])}
    assert len(chat.reference.encode(Opening([asked], None)).media) == 1
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
    history = [asked, {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": parts([2, "a crop"])}
    with pytest.raises(ChatTemplateError, match="0 of 1 pictures"):
        chat.reference.encode(FollowUp(history, [result], None, [tokenizer().eos_token_id], "stop"))


def test_a_model_without_a_processor_reads_text_only() -> None:
    chat = ChatTemplate(tokenizer())
    with pytest.raises(ChatTemplateError, match="message 0 holds a picture, and this model reads text only"):
        chat.encode_here(Opening([{"role": "user", "content": parts([1, "what is it?"])}], None))


def test_a_picture_is_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chat = reader("gemma3")
    assert chat.reference.reader is not None
    new = picture_of(np.full((20, 20, 3), 77, np.uint8))
    seen = chat.reference.reader.seen(new)
    assert set(seen.inputs) >= {"pixel_values"}
    monkeypatch.setattr(chat.reference.reader._looker, "_processor", None)
    assert chat.reference.reader.seen(new) is seen


def test_a_picture_that_the_processor_refuses_is_refused_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's takes none that is 200 times as long as it is high."""
    _, chat = reader("gemma3")
    assert chat.reference.reader is not None

    def refuse(**_: Any) -> None:
        raise ValueError("absolute aspect ratio must be smaller than 200")

    monkeypatch.setattr(chat.reference.reader._looker, "_processor", refuse)
    new = picture_of(np.full((2, 900, 3), 7, np.uint8))
    with pytest.raises(PictureError, match="aspect ratio"):
        chat.encode_here(Opening([{"role": "user", "content": [{"type": "image", "image": new}]}], None))


# -- the cache --------------------------------------------------------------------------------------------------------

messages = st.lists(contents, min_size=2, max_size=6)


@pytest.mark.parametrize("family", FAMILIES)
@given(messages)
def test_the_cache_gives_what_the_reference_gives(family: str, said: list[list[str | int]]) -> None:
    _, chat = reader(family)
    history: list[dict[str, Any]] = [{"role": "user", "content": parts(said[0])}]
    for number, then in enumerate(said[1:]):
        history.append({"role": "assistant", "content": f"It is {number}."})
        new = {"role": "user", "content": parts(then)}
        asked = FollowUp(list(history), [new], None, [chat.tokenizer.eos_token_id], "stop")
        shape = chat._shape(asked)
        blank = any(isinstance(part, str) and part.isspace() for part in then)
        assert blank or shape is not None, "what comes after pictures, and shows some, takes no full render"
        assert chat.encode_here(asked) == chat.encode_here(asked) == chat.reference.encode(asked)
        history.append(new)


COUNTS = """{%- set seen = namespace(count=0) %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{%
if part.type == 'image' %}{% set seen.count = seen.count + 1 %}Picture {{ seen.count }}: <start_of_image>{%
else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_counts_pictures_is_left_to_the_reference() -> None:
    processor = FAMILIES["gemma3"]()
    chat = ChatTemplate(processor.tokenizer, chat_template=COUNTS, processor=processor)
    history: list[dict[str, Any]] = [{"role": "user", "content": parts(["look", 1])}]
    for number in range(4):
        history.append({"role": "assistant", "content": "Yes."})
        new = {"role": "user", "content": parts(["and", 2, "now"])}
        encoded = chat.encode_here(FollowUp(list(history), [new], None, [processor.tokenizer.eos_token_id], "stop"))
        assert f"Picture {number + 2}: " in chat.decode(encoded.ids)
        history.append(new)


def test_a_model_that_reads_text_only_is_never_given_a_picture_in_silence() -> None:
    chat = ChatTemplate(tokenizer())
    shown, said = {"role": "user", "content": parts(["look", 1])}, {"role": "assistant", "content": "Yes."}
    plain = {"role": "user", "content": "And now?"}
    for history, new in (([plain, said], shown), ([shown, said], plain)):
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match="multimodal-content"):
                chat.encode_here(FollowUp(history, [new], None, [tokenizer().eos_token_id], "stop"))
