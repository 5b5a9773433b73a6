"""The glue against an independent implementation, PrimeIntellect's ``renderers``, where that knows the template.

Their renderers are written by hand, model by model, so an equal result is no coincidence. The differences over
the whole zoo come from templates that are variants of the model's own (an added ``<think>``, a result wrapped in
JSON) and, below, from text encoded in pieces.
"""

from typing import Any

import pytest
from tokenizers import AddedToken

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.errors import ChatTemplateError
from tests.cases import table
from tests.unit.chat import chat_zoo as zoo

pytestmark = pytest.mark.xdist_group("templates")  # the worker that compiles them has them all

renderers: Any = pytest.importorskip("renderers")

SAME_TEMPLATE: dict[str, str] = table("chat")["templates that renderers know"]
ENCODED_IN_PIECES = {("miles__kimi_k25_fixed.jinja", "spaces around")}
"""They encode a message's text apart from the line before it; the tokenizer joins the white space of both."""
NEEDED = (
    "<|endoftext|>", "<|im_user|>", "<bos>", "<eos>", "<think>", "</think>", "<tool_call>", "</tool_call>", "]~!b[",
    "<minimax:tool_call>", "</minimax:tool_call>", "<|image|>", "<|image>", "<image|>", "<|audio>", "<audio|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<tool_response>", "</tool_response>",
)  # fmt: skip


@zoo.needs_zoo
@pytest.mark.parametrize(("name", "renderer"), [pair for pair in SAME_TEMPLATE.items() if pair[0] in zoo.NAMES])
def test_both_write_the_same_glue(name: str, renderer: str) -> None:
    tokenizer = zoo.tokenizer_for(zoo.source(name))
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in NEEDED if token not in tokenizer.get_vocab()]
    )
    config = type(renderers.config_from_name(renderer))(thinking_retention="all")
    theirs = renderers.create_renderer(tokenizer, config)
    chat = ChatTemplate(tokenizer)
    compared = 0
    for label, scenario in zoo.SCENARIOS.items():
        if "injected" in label:
            continue  # they encode it as control tokens
        tools = zoo.TOOLS if scenario.tools else None
        sampled = [7] if scenario.cut else [7, zoo.stop_of(name, tokenizer, scenario.tool_turn)]
        bridged = theirs.bridge_to_next_turn([11, 12], sampled, scenario.new, tools=tools)
        if bridged is None:
            continue
        want = bridged.token_ids[2 + len(sampled) :]
        finish = "length" if scenario.cut else "stop"
        arguments = {"sampled_ids": sampled, "finish_reason": finish}
        if "gemma" in name and scenario.tool_turn and scenario.history[-1]["content"]:
            # Its template writes a turn's text after the results of its calls.
            with pytest.raises(ChatTemplateError, match="text-moved"):
                chat.glue(scenario.history, scenario.new, tools, **arguments)
            continue
        got = chat.glue(scenario.history, scenario.new, tools, **arguments)
        if (name, label) in ENCODED_IN_PIECES:
            assert got != want
            assert chat.decode(got) == chat.decode(want)
        else:
            assert got == want, label
        compared += 1
    assert compared >= 17
