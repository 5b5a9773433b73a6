"""Real processors of several families, made small over the embedded tokenizer, with the families' own templates."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from tests.embedded import tokenizer


def _tokenizer(*tokens: str, **named: str) -> Any:
    """Return the embedded tokenizer with a family's control tokens; ``named`` are those that its class names."""
    copy = type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer, **named)
    copy.add_special_tokens({"additional_special_tokens": [*tokens, *named.values()]})
    copy.eos_token = "<|im_end|>"
    return copy


def template(name: str) -> str:
    """Return a chat template as the model's makers wrote it."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def gemma3() -> Any:
    import transformers as t

    tokens = _tokenizer(
        "<start_of_turn>", "<end_of_turn>",
        image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>",
    )  # fmt: skip
    images = t.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return t.Gemma3Processor(images, tokens, chat_template=template("gemma3"), image_seq_length=6)


def llava_next() -> Any:
    import transformers as t

    tokens = _tokenizer("<image>", "</s>")
    tokens.eos_token = "</s>"
    images = t.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )
    return t.LlavaNextProcessor(
        images, tokens, patch_size=14, vision_feature_select_strategy="default", chat_template=template("llava_next"),
        num_additional_image_tokens=1,
    )  # fmt: skip


def idefics3() -> Any:
    import transformers as t

    tokens = _tokenizer(
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    )
    images = t.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return t.Idefics3Processor(images, tokens, image_seq_len=3, chat_template=template("idefics3"))


FAMILIES: dict[str, Callable[[], Any]] = {"gemma3": gemma3, "llava_next": llava_next}
