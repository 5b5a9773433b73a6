"""Real processors and models of several families, small and random, over the embedded tokenizer, with own templates.

Qwen's processors need torchvision, which lives in an environment of its own (``make test-real``).
"""

from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
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


def gemma3_with_tools() -> Any:
    """Return Gemma's processor with a template that shows pictures in tools' results, as Qwen's do."""
    processor = gemma3()
    own = template("qwen3_vl").replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    processor.chat_template = own
    return processor


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


QWEN = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def _qwen(name: str, patch: int, **sizes: Any) -> Any:
    import transformers as t

    kind = {"qwen2_5_vl": t.Qwen2_5_VLProcessor, "qwen3_vl": t.Qwen3VLProcessor}[name]
    images = t.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, **sizes)
    video = {"qwen2_5_vl": t.Qwen2VLVideoProcessor, "qwen3_vl": t.Qwen3VLVideoProcessor}[name]
    videos = video(patch_size=patch, merge_size=2)
    return kind(images, _tokenizer(*QWEN, pad_token="<|endoftext|>"), videos, chat_template=template(name))


def qwen2_5_vl() -> Any:
    return _qwen("qwen2_5_vl", 14, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64})


def qwen3_vl() -> Any:
    return _qwen("qwen3_vl", 16, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64})


def random_model(family: str, processor: Any) -> Any:
    """Return a random model of a family, for the ids and pictures of its processor."""
    import torch
    import transformers as t

    tokens = processor.tokenizer
    number = tokens.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokens), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id,
        "initializer_range": 0.1,
    }  # fmt: skip
    if family == "llava_next":
        vision = {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 14, "initializer_range": 0.1,
        }  # fmt: skip
        kind, config = t.LlavaNextForConditionalGeneration, t.LlavaNextConfig(
            text_config=t.Qwen3Config(**text), vision_config=t.CLIPVisionConfig(**vision),
            image_token_id=number("<image>"),
            image_grid_pinpoints=processor.image_processor.image_grid_pinpoints, vision_feature_layer=-1,
        )  # fmt: skip
    else:
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
        vision = {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
            "spatial_merge_size": 2, "initializer_range": 0.1,
        }  # fmt: skip
        if family == "qwen2_5_vl":
            kind, configure = t.Qwen2_5_VLForConditionalGeneration, t.Qwen2_5_VLConfig
            vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
            del text["head_dim"]
        else:
            kind, configure = t.Qwen3VLForConditionalGeneration, t.Qwen3VLConfig
            vision |= {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
            text["rope_parameters"]["mrope_interleaved"] = True
        config = configure(
            text_config=text,
            vision_config=vision,
            image_token_id=number("<|image_pad|>"),
            video_token_id=number("<|video_pad|>"),
            vision_start_token_id=number("<|vision_start|>"),
            vision_end_token_id=number("<|vision_end|>"),
        )
    torch.manual_seed(0)
    return kind(config).eval()


def save(family: str, folder: Path) -> Any:
    """Save a random model of a family with its processor, as its makers publish theirs; return it."""
    processor = FAMILIES[family]()
    model = random_model(family, processor)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


PLACEHOLDERS = {
    "gemma3": "<start_of_image>", "gemma3_with_tools": "<start_of_image>", "llava_next": "<image>",
    "qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>",
}  # fmt: skip
"""What each family's template writes for a picture."""
FAMILIES: dict[str, Callable[[], Any]] = {"gemma3": gemma3, "llava_next": llava_next}
if find_spec("torchvision"):
    FAMILIES |= {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
WITH_TOOLS = {"gemma3_with_tools": gemma3_with_tools}
"""Those whose template shows pictures in tools' results."""
if find_spec("torchvision"):
    WITH_TOOLS["qwen3_vl"] = qwen3_vl
MODELS = [family for family in FAMILIES if family != "gemma3"]  # those with a random model
