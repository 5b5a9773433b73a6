"""What glue, prompts and parsing cost: ``python benchmarks/bench_chat.py``.

CPU microseconds per call, the best of several rounds, on a template like Qwen2.5's. The lines say what is
measured and against which target; nothing here is asserted.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import get_format
from fsm_rollout.chat.reference import FollowUp, Opening

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\n\\n# Tools\\n\\n<tools>' }}"
    "{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not tools) %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
WORDS = [
    "the agent",
    "reads",
    "current",
    "state",
    "then",
    "decides",
    "which",
    "value",
    "of table",
    "should be",
    "fetched",
]


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    source = random.Random(0)
    corpus = [" ".join(source.choices(WORDS, k=60)) for _ in range(300)] + [TEMPLATE, json.dumps(schema(0))] * 20
    corpus += [json.dumps({"name": "lookup0", "arguments": {"key": f"k{source.randrange(9999)}", "count": 3}})] * 99
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    fast.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    fast.chat_template = TEMPLATE
    return fast


def schema(index: int) -> dict[str, object]:
    properties = {
        "key": {"type": "string", "description": "The key to look up."},
        "count": {"type": "integer", "description": "How many rows to return."},
    }
    function = {"name": f"lookup{index}", "description": "Look up a value in the table."}
    return {"type": "function", "function": function | {"parameters": {"type": "object", "properties": properties}}}


def history(length: int) -> list[dict[str, object]]:
    call = {"type": "function", "function": {"name": "lookup0", "arguments": {"key": "k1", "count": 2}}}
    turn = {"role": "assistant", "content": " ".join(WORDS), "tool_calls": [call]}
    result = {"role": "tool", "content": "value of k1 is " + " ".join(WORDS[:12])}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You are a helpful agent."},
        {"role": "user", "content": " ".join(WORDS)},
    ]
    while len(messages) < length - 1:
        messages += [dict(turn), dict(result)]
    return [*messages, dict(turn)]


def microseconds(run: Callable[[], object], number: int = 2000, rounds: int = 7) -> float:
    run(), run()
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(number):
            run()
        best = min(best, (time.process_time() - start) / number)
    return best * 1e6


def main() -> None:
    tok = tokenizer()
    chat = ChatTemplate(tok)
    one, thirty = ((schema(0),), tuple(map(schema, range(30))))
    new = [{"role": "tool", "content": "value of k17 is " + " ".join(WORDS[:12])}]
    stop = [5] * 60 + [tok.eos_token_id]
    text = (
        f"\n<|im_start|>user\n<tool_response>\n{new[0]['content']}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    print(
        f"encoding the glue's text alone                   {microseconds(lambda: chat._encoder.encode(text)):8.1f} µs"
    )
    for tools, length in itertools.product((one, thirty), (2, 200)):
        past = history(length)
        took = microseconds(lambda: chat.glue(past, new, tools, sampled_ids=stop, finish_reason="stop"))  # noqa: B023
        print(f"glue, {len(tools):2} tools, {length:3} messages (target 60, flat)     {took:8.1f} µs")
    past = history(200)
    asked = FollowUp(past, new, thirty, stop, "stop")
    took = microseconds(lambda: chat.reference.encode(asked), number=5, rounds=3)
    print(f"the same by the reference                        {took:8.1f} µs")
    turn = " ".join(random.Random(1).choices(WORDS, k=40))
    call = json.dumps({"name": "lookup0", "arguments": {"key": "k123", "count": 3}})
    turn = f"{turn}\n<tool_call>\n{call}\n</tool_call>"
    hermes = get_format("hermes")
    size = len(chat._encoder.encode(turn))
    print(f"parse of a {size}-token hermes turn (target 20)      {microseconds(lambda: hermes.parse(turn)):8.1f} µs")
    count = itertools.count()

    def prompt() -> object:
        system = {"role": "system", "content": "You are a helpful agent."}
        return chat.prompt([system, {"role": "user", "content": f"task {next(count)}: " + " ".join(WORDS)}], thirty)

    print(f"prompt sharing system and 30 tools (target 150)  {microseconds(prompt, number=500):8.1f} µs")
    messages = history(3)[:2]
    took = microseconds(lambda: chat.reference.encode(Opening(messages, thirty)), number=20, rounds=3)
    print(f"the same without sharing                         {took:8.1f} µs")


if __name__ == "__main__":
    main()
