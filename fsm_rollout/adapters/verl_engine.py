"""verl's ``LLMServerClient`` as an engine: token ids in, token ids with log probabilities out.

Invariant: verl owns the servers and their weights. While it loads these, and the engine is held for that, an answer
that verl cuts is no failure: its rest is asked for afterwards. An answer carries the weight versions
(``min_global_steps`` to ``max_global_steps``) that verl says; where they differ, only the last token of the answer
carries the newest, because verl does not say which token changed over. A picture goes as verl's servers take it:
decoded, beside ids in which it is one placeholder; what they read is not compared with the stream, because verl does
not say how much that was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import Chunk, EngineFacts, HalfLoaded, Load, Request, Weights, basic_facts
from fsm_rollout.engines.request_tasks import RequestTasks
from fsm_rollout.engines.updating import ServerAddress
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import stop_tokens
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import MediaSpan, Note, as_ids, as_logprobs, collapsed, routed_experts

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class VerlEngine(RequestTasks):
    """See the module: a source of tokens that can be held, whose weights and sleep are verl's own.

    ``max_context`` is verl's ``prompt_length + response_length``; ``processor`` is verl's own, of a model that sees.
    """

    def __init__(self, client: Any, tokenizer: Any, *, max_context: int, processor: Any = None) -> None:
        super().__init__()
        self.client = client
        self.tokenizer = tokenizer
        self.processor = processor
        self.max_context = max_context
        self.eos_ids = stop_tokens(tokenizer.eos_token_id)
        self._going = asyncio.Event()  # whether it is not held
        self._going.set()
        self._holds = 0  # how often it was held

    @property
    def facts(self) -> EngineFacts:
        """What verl's servers run."""
        return basic_facts(self, self.processor)

    async def _answer(self, request: Request, stream: ChunkStream) -> Chunk:
        """Ask verl, whose client balances the load."""
        stream.put(Chunk(request.request_id, weight_version=self.weight_version))
        sampling, rest = request.sampling, request
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
            **sampling.penalties,
            **({"min_p": sampling.min_p} if sampling.min_p else {}),
            **sampling.extra,
            "logprobs": True,
            "stop_token_ids": sorted(sampling.stop_ids),
        }
        try:
            pictures = {"image_data": await asyncio.to_thread(_decoded, request.media)} if request.media else {}
            while True:
                await self._going.wait()
                holds = self._holds
                ids, words = collapsed(rest.ids, rest.media).tolist(), params | {"max_tokens": rest.sampling.max_tokens}
                output = await self.client.generate(request.session, prompt_ids=ids, sampling_params=words, **pictures)
                held = output.stop_reason == "aborted" and self._holds > holds  # perhaps no longer: its answer travels
                chunks = [] if held and not output.token_ids else self._chunks(rest, output)
                goes_on = held and all(chunk.finish_reason in (None, FinishReason.ABORT) for chunk in chunks)
                for chunk in chunks:
                    if chunk.finish_reason is not None and not goes_on:
                        return chunk
                    stream.put(replace(chunk, finish_reason=None))
                    rest = rest.continued(chunk.ids, request.request_id)
        except Exception as error:  # whatever verl's client and servers raise
            text = f"EngineError: {error if isinstance(error, EngineError) else f'{type(error).__name__}: {error}'}"
            aborted = Chunk(request.request_id, weight_version=self.weight_version, finish_reason=FinishReason.ABORT)
            return replace(aborted, error=text)

    def _chunks(self, request: Request, output: Any) -> list[Chunk]:
        """Return verl's answer as one chunk, or two where it spans weight versions."""
        ids = list(output.token_ids)[: request.sampling.max_tokens]
        if output.log_probs is None or not ids:
            lacks = "no token" if not ids else "no log probabilities; set rollout.calculate_log_probs=true"
            raise EngineError(f"verl's server answered request {request.request_id} with {lacks}")
        logprobs = list(output.log_probs)[: len(ids)]
        fields = output.extra_fields
        step = fields.get("global_steps")
        newest = fields.get("max_global_steps", step)
        oldest = fields.get("min_global_steps", newest)
        newest, oldest = int(newest or 0), int(oldest if oldest is not None else newest or 0)
        self.weight_version = max(self.weight_version, newest)
        if ids[-1] in request.sampling.stop_ids:
            reason = FinishReason.STOP
        else:
            cut = output.stop_reason == "aborted" and len(ids) < request.sampling.max_tokens
            reason = FinishReason.ABORT if cut else FinishReason.LENGTH
        notes: tuple[Note, ...] = ()
        experts = output.routed_experts
        if experts is not None:  # [tokens, layers, top_k], from the first token on
            fed = np.asarray(experts)[request.routed : len(request.ids) + len(ids) - 1]
            notes = (routed_experts(request.routed, fed),)
        whole = Chunk(
            request.request_id, as_ids(ids), as_logprobs(logprobs), weight_version=newest, finish_reason=reason,
            notes=notes,
        )  # fmt: skip
        if oldest == newest:
            return [whole]
        before = Chunk(request.request_id, whole.ids[:-1], whole.logprobs[:-1], weight_version=oldest)
        last = replace(whole, ids=whole.ids[-1:], logprobs=whole.logprobs[-1:])
        return [before, last] if len(ids) > 1 else [last]

    # -- while verl loads new weights --------------------------------------------------------------------------------

    @property
    def address(self) -> ServerAddress:
        """No address: verl reaches its servers by handles of its own."""
        return ServerAddress("", None, 1)

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Raise EngineError: verl does it."""
        raise EngineError("verl loads the weights of its servers itself; hold the rollout meanwhile (updating)")

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        """Leave it to verl, which is about to load them."""

    async def end_update(self, version: int | None) -> None:
        """Take what is sampled from here on for this version, until verl says another."""
        if version is None:
            raise HalfLoaded("verl's update of its servers has failed")
        self.weight_version = version

    async def pause(self) -> None:
        """Ask for nothing, and for no rest of what verl cuts, until :meth:`resume`."""
        self._going.clear()
        self._holds += 1

    async def resume(self) -> None:
        """Go on."""
        self._going.set()

    def load(self) -> Load:
        """Return how many answers are waited for."""
        return Load(running=len(self._tasks))

    async def aclose(self) -> None:
        """Wait for no answer any more."""
        self._abort(list(self._tasks))


def _decoded(media: Sequence[MediaSpan]) -> list[Image]:
    return [span.picture.image() for span in media]
