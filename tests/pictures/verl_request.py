"""A request with pictures as verl's server for SGLang 0.5.21 passes it on: in SGLang's own process, with images.

``python -m tests.pictures.verl_request FOLDER`` saves a small model there, has :class:`VerlEngine` ask for a few
tokens, and prints how many ids SGLang has read of how many, and how far the farthest ratio to the model's own forward
pass is from 1. A process of its own, as SGLang's engine changes the one that it runs in.
"""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fsm_rollout.adapters.verl_engine import VerlEngine
from fsm_rollout.chat.pictures import looker_of
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.sglang import cpu
from fsm_rollout.model.folders import load_processor
from fsm_rollout.trajectory.tokens import MediaSpan, as_ids
from tests.unit.batch.test_media import picture
from tests.vision import save


class Client:
    """What verl's ``SGLangHttpServer.generate`` does with a request (verl 0.9.1), behind its ``LLMServerClient``."""

    def __init__(self, engine: Any) -> None:
        self.manager = engine.tokenizer_manager
        self.read = 0

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: list[Any]
    ) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling_params["max_new_tokens"] = sampling_params.pop("max_tokens")
        request = GenerateReqInput(
            rid=request_id, input_ids=prompt_ids, return_logprob=sampling_params.pop("logprobs"),
            sampling_params=sampling_params, image_data=image_data,
        )  # fmt: skip
        output = await anext(self.manager.generate_request(request, None))
        self.read = output["meta_info"]["prompt_tokens"]
        logprobs, ids, _ = zip(*output["meta_info"]["output_token_logprobs"], strict=True)
        return SimpleNamespace(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", routed_experts=None, extra_fields={}
        )


def main(folder: Path) -> None:
    """Ask, and compare."""
    arguments = {**cpu.prepare(1, 1), "enable_multimodal": True, "log_level": "error", "context_length": 2000}
    model = save("qwen2_5_vl", folder)
    import sglang

    client = Client(sglang.Engine(model_path=str(folder), **arguments))
    eye = load_processor(folder)
    tokens, pad = eye.tokenizer, eye.image_token_id

    def said(text: str) -> Any:
        return as_ids(tokens.encode(text, add_special_tokens=False))

    # 1. Pictures, and between them ids that no tokenizer makes of their text.
    ids, media = said("look "), list[MediaSpan]()
    for shown in (picture(1, 60, 90), picture(2, 57, 128)):
        ids += said("<|vision_start|>")
        media.append(MediaSpan(len(ids), len(looker_of(eye).seen(shown, "<|image_pad|>").ids), shown, pad))
        ids += looker_of(eye).seen(shown, "<|image_pad|>").ids + said("<|vision_end|>")
        for letter in "hello":
            ids += said(letter)
    # 2. What is sampled after them.
    engine = VerlEngine(client, tokens, max_context=2000, processor=eye)
    request = Request("r", ids, SamplingParams(6, temperature=0.7, stop_ids=frozenset([pad])), media=tuple(media))

    async def answer() -> tuple[list[int], list[float]]:
        chunks = [chunk async for chunk in engine.generate([request])]
        assert chunks[-1].error is None, chunks[-1].error
        return [id_ for chunk in chunks for id_ in chunk.ids], [p for chunk in chunks for p in chunk.logprobs]

    got, logprobs = asyncio.get_event_loop().run_until_complete(answer())
    # 3. The model's own forward pass.
    inputs = eye.image_processor([span.picture.image() for span in media], return_tensors="pt")
    fed = torch.tensor([[*ids, *got[:-1]]])
    with torch.no_grad():
        logits = model(input_ids=fed, **inputs, mm_token_type_ids=(fed == pad).long()).logits[0, -len(got) :]
    own = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, torch.tensor(got)[:, None])[:, 0]
    print(client.read, len(ids), float((own - torch.tensor(logprobs)).exp().sub(1).abs().max()), flush=True)
    os._exit(0)  # SGLang's processes end with this one


if __name__ == "__main__":
    main(Path(sys.argv[1]))
