"""What is asked of an SGLang server, and what its answers mean.

Invariants:

1. A logprob is that of the distribution which the token was sampled from: SGLang's own is after temperature but before
   top_k and top_p, so where these cut, the renormalised one of its sampling mask is taken instead.
2. Once weights were loaded from here, no token of others is taken: every answer says which weights sampled it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fsm_rollout.engines.http.endpoint import (
    ANSWER_WITHIN,
    MEMORY_WITHIN,
    NO_NUMBER,
    UPDATE_WITHIN,
    AnswerPart,
    Entry,
    number_of,
    refusal_in,
    second_answer,
)
from fsm_rollout.engines.http.lora import AdaptedEndpoint
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Weights
from fsm_rollout.engines.sglang.forms import Info, Meta, ModelInfo, OrderTaken, OutputLine
from fsm_rollout.engines.sglang.pictures import SentPictures, shown_once
from fsm_rollout.engines.weights import check_complete, check_folder, shapes_in
from fsm_rollout.errors import ChatTemplateError, EngineError
from fsm_rollout.model.folders import config_number, model_folder
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import TokenScores, as_ids, as_logprobs

logger = logging.getLogger(__name__)

# What of SGLang's sampling parameters would break what is promised of tokens, or has a key of its own.
OWN = frozenset({"n", "top_p", "top_k", "min_p", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty"})
GRAMMARS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})  # of its parameters, those that are one
IDLE_WITHIN = 30.0  # seconds that a server has to become idle when nothing is asked of it any more
LOOK_WITHIN = 120.0  # seconds that it has to look at its first picture


_decode_line = msgspec.json.Decoder(OutputLine).decode


class SGLangEndpoint(AdaptedEndpoint):
    """One SGLang server.

    Args:
        folder: that of its model.
        send_every: tokens between two parts of an answer.
        processor: that of a model that sees pictures.
        alone: whether nobody else uses it.
    """

    name, kind, described = "SGLang", "SGLang server", "an SGLang server"
    health, generate = "/health", "/generate"

    def __init__(
        self,
        url: str,
        api_key: str | None,
        folder: Path,
        send_every: int,
        *,
        processor: Any = None,
        alone: bool = False,
    ) -> None:
        super().__init__(url, api_key)
        self.processor = processor
        self.folder = folder
        self._send_every = send_every
        self._alone = alone
        self._vocabulary = config_number(folder, "vocab_size")
        self._experts = [config_number(folder, name) or 0 for name in ("num_hidden_layers", "num_experts_per_tok")]
        # What we told the server to call its weights. Until then others may update them without our knowing.
        self.label: str | None = None
        self.whole = True  # whether its weights are all of one version, and it calls them so
        self.info = Info(0)
        self._mask_tokens = 0  # the longest sampling mask that it gives
        self._says_experts = False  # whether it says which experts tokens were routed to
        self._memory = ["kv_cache"]  # what it gives back while it sleeps
        self._urgency = 0  # what one step of priority adds to its number; 0: it does not schedule by priority
        self._caller = secrets.token_hex(4)  # what our sessions' names begin with: others may use the server too
        self._pictures = SentPictures(processor, in_files=alone)

    async def meet(self) -> int:
        """Learn what the server is, and return the version of its weights (0 where that is no number)."""
        info = await self.ask("/server_info", Info)
        self.max_context = info.max_req_input_len
        self.capacity = info.max_total_num_tokens * max(1, info.dp_size)
        self.info = info
        self._mask_tokens = info.sampling_mask_max_tokens
        self._says_experts = info.enable_return_routed_experts
        self.keeps_sessions = info.enable_session_radix_cache
        without = info.skip_tokenizer_init or info.grammar_backend in (None, "none")
        self.no_grammar = "start SGLang with `args: {grammar_backend: xgrammar}`" if without else ""
        if info.enable_priority_scheduling:
            self._urgency = -1 if info.schedule_low_priority_values_first else 1
        if self._says_experts and not all(self._experts):
            raise EngineError(
                f"{self.name} at {self.url} returns routed experts, and the model folder's config.json "
                "does not say num_hidden_layers and num_experts_per_tok; start it without enable_return_routed_experts"
            )
        # What sleep gives back must be there again later: the weights only when SGLang keeps a copy of them.
        self._memory = ["kv_cache", "weights"] if info.enable_weights_cpu_backup else ["kv_cache"]
        model = await self.ask("/model_info", ModelInfo)
        if self.processor is not None and (why := await self._why_blind(model, info)) is not None:
            logger.warning("%s at %s reads text only: %s", self.name, self.url, why)
            self.processor = None
        label = str(model.weight_version)
        if self._alone:
            self.label = label
        return number_of(label)

    async def _why_blind(self, model: ModelInfo, info: Info) -> str | None:
        """Return why the server cannot be sent pictures; ``None``: it reads one as the model's processor does."""
        if not model.has_image_understanding or info.language_model_only:
            return "it was not started for pictures (--enable-multimodal)"
        try:
            probe = await asyncio.to_thread(shown_once, self.processor)
            body = {"sampling_params": {"max_new_tokens": 1}, **self._pictures.prompt(probe.ids, probe.media)}
            line = self.decode("/generate", await self.call("/generate", body, within=LOOK_WITHIN), OutputLine)
        except ChatTemplateError:  # the agent's own template may show pictures
            return None
        except EngineError as error:
            return str(error)
        read, made = None if line.meta_info is None else line.meta_info.prompt_tokens, len(probe.ids)
        if read != made:
            return f"it has read {read} tokens of a prompt with a picture, of which the model's processor makes {made}"
        return None

    async def aclose(self) -> None:
        """Close the connections, and leave no file behind."""
        await super().aclose()
        self._pictures.close()

    async def abort(self, rids: Collection[str], *, everything: bool) -> bool:
        """Have requests end soon; all in one call where nobody else has any."""
        asked: list[Mapping[str, object]] = [{"rid": rid} for rid in rids]
        if everything and self._alone:
            asked = [{"rid": "", "abort_all": True}]
        with suppress(EngineError):  # asked again, or the requests fail by themselves
            await asyncio.gather(*(self.call("/abort_request", body) for body in asked))
        return True

    async def end_session(self, session: str) -> None:
        """See :class:`Endpoint`."""
        await self.call("/close_session", {"session_id": f"{self._caller}/{session}"})

    # -- weights and memory ------------------------------------------------------------------------------------------

    async def loader(self, weights: Weights) -> Callable[[int], Awaitable[None]]:
        """Check a folder that the server reads under the same path; tensors go by :class:`WeightRoutes`."""
        assert not isinstance(weights, Mapping)
        folder = model_folder(weights).resolve()
        check_complete(folder, shapes_in(self.folder))
        await asyncio.to_thread(check_folder, folder)

        async def load(version: int) -> None:
            await self.flush_cache()
            path, body = "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)}
            loaded = await self.tell(path, body)
            if not loaded.success:
                # Half-way, it has no copy of the old ones.
                kind = ReplicaLost if "Rolling back" in loaded.message else EngineError
                raise kind(f"the SGLang server {self.url} refused the weights: {loaded.message}")
            self.label, self.whole = str(version), True
            await self.forget_adapter()

        return load

    async def tell(self, path: str, body: Mapping[str, object]) -> OrderTaken:
        """POST something that concerns its weights, and return whether it has done it."""
        return self.decode(path, await self.call(path, body, within=UPDATE_WITHIN, may_refuse=True), OrderTaken)

    async def call_weights(self, label: str) -> None:
        """See :class:`AdaptedEndpoint`."""
        await self.call("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        self.label, self.whole = label, True

    async def adopt(self, version: int, *, doubted: bool, adapted: bool | None) -> None:
        """See :class:`~fsm_rollout.engines.http.endpoint.Endpoint`."""
        label = str((await self.ask("/model_info", ModelInfo)).weight_version)
        self.whole = self.adopted(label, version, adapted)
        if not self.whole:
            raise HalfLoaded(f"{self.url} has weights of version '{label}', and not {version}, as was loaded into all")
        self.label = label

    async def refuses(self, what: str, body: Mapping[str, object]) -> str:
        """See :class:`AdaptedEndpoint`."""
        answer = await self.tell(f"/{what}_lora_adapter", body)
        return "" if answer.success else answer.why or "it does not say why"

    @cached_property
    def is_here(self) -> bool:
        """Whether the server's address is one of this host's: only such an address can be bound here."""
        host = urlsplit(self.url).hostname or ""
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.bind(address)
                return True
        return False

    async def flush_cache(self) -> None:
        """Wait until it has nothing to do, and have it forget what it has computed."""
        await self.call(f"/flush_cache?timeout={IDLE_WITHIN:g}", {}, within=IDLE_WITHIN + ANSWER_WITHIN)

    async def sleep(self) -> None:
        """Have it give memory back."""
        await self.flush_cache()
        await self.call("/release_memory_occupation", {"tags": self._memory}, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        """Have it take the memory again."""
        await self.call("/resume_memory_occupation", {"tags": self._memory}, within=MEMORY_WITHIN)

    # -- generating --------------------------------------------------------------------------------------------------

    def body(self, entry: Entry) -> dict[str, object]:
        """Write a request; EngineError if SGLang cannot say the logprobs of such sampling."""
        request, params = entry.request, entry.request.sampling
        body: dict[str, object] = {"input_ids": entry.ids.tolist()}
        if self.processor is not None:
            body = self._pictures.prompt(entry.ids, request.media)
        body |= {"rid": entry.rid, "return_logprob": True, "stream": True}
        if self.keeps_sessions and request.session:
            body["session_id"] = f"{self._caller}/{request.session}"
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if request.scored_from:  # SGLang computes what is cached of these ids again, and no more
            body |= {"top_logprobs_num": request.score_top, "logprob_start_len": request.scored_from - 1}
            return body | {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        sampling: dict[str, object] = {
            "max_new_tokens": entry.room,
            "temperature": params.temperature,
            "ignore_eos": params.ignore_eos,
            "sampling_seed": params.seed % 2**63,
            "stream_interval": self._send_every,
        }
        body["sampling_params"] = sampling
        if not params.ignore_eos:
            sampling["stop_token_ids"] = list(params.stop_ids)
        if self._urgency:  # what has begun comes first, as in the pool's queue
            body["priority"] = self._urgency * (2 if request.sampled else min(1, request.turn))
        if self._says_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": entry.routed}
        sampling |= params.penalties
        if taken := sorted(params.extra.keys() & (sampling.keys() | OWN)):
            raise EngineError(f"sampling.extra: {', '.join(taken)} is set by the engine itself; leave it out")
        sampling |= params.extra
        if params.extra and GRAMMARS & params.extra.keys() and (entry.sampled or request.sampled):
            raise EngineError("SGLang begins a grammar anew where a turn goes on, so it cannot; ask for the turn again")
        if params.cuts:
            if params.top_k > self._mask_tokens:
                raise EngineError(
                    f"top_k is {params.top_k}, and SGLang gives exact logprobs for at most {self._mask_tokens} kept "
                    f"tokens; lower top_k or raise SGLang's sampling_mask_max_tokens"
                )
            # A mask that is longer than allowed costs the request; ties at the cut may add a few tokens.
            most = self._mask_tokens - self._mask_tokens // 16
            if self._vocabulary is not None and self._vocabulary <= self._mask_tokens:
                most = self._vocabulary
            sampling |= {"top_p": params.top_p, "top_k": params.top_k or most, "min_p": params.min_p}
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return body

    def read_part(self, event: bytes, body: Mapping[str, Any]) -> AnswerPart:
        """Read one of SGLang's outputs; one of other weights than ours is an error, as of a restarted server."""
        # 1. Its form.
        try:
            line = _decode_line(event)
        except msgspec.MsgspecError as error:
            raise self.unreadable(event, str(error)) from None
        if line.error is not None:
            raise refusal_in(line.error)
        if line.meta_info is None or line.output_ids is None:
            raise self.unreadable(event, f"it lacks `{'meta_info' if line.meta_info is None else 'output_ids'}`")
        if line.index:
            raise second_answer(self.url)
        meta = line.meta_info
        # 2. Whose tokens they are.
        if self.label is not None and meta.weight_version is not None and str(meta.weight_version) != self.label:
            raise ReplicaLost(
                f"{self.url} samples with weights of version '{meta.weight_version}', not '{self.label}' as loaded "
                f"here; it was restarted, or others update it"
            )
        # 3. What it says.
        part = AnswerPart(
            line.output_ids,
            [logprob for logprob, _, _ in meta.output_token_logprobs],
            meta.completion_tokens,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
        )
        if meta.finish_reason is not None:
            part.finish_reason, part.message = FinishReason(meta.finish_reason.type), meta.finish_reason.message
        if "return_sampling_mask" in body:
            part.logprobs, part.masks = meta.output_token_sampling_logprobs, meta.output_token_sampling_mask
        if "logprob_start_len" in body and meta.input_token_logprobs is not None:
            part.scores = self._read_scores(meta, body)
        if meta.routed_experts:
            part.experts = self._read_experts(meta.routed_experts)
        return part

    def _read_scores(self, meta: Meta, body: Mapping[str, Any]) -> TokenScores:
        """Return the log-probs of the ids that were sent; the first that SGLang says has none, and nobody asked."""
        _, *places = meta.input_token_logprobs or [(None, 0, None)]
        ids = [token for _, token, _ in places]
        if "input_ids" in body and ids != body["input_ids"][body["logprob_start_len"] + 1 :]:
            raise EngineError(f"{self.url} gives the log-probs of {len(ids)} other tokens than were sent")
        top = body["top_logprobs_num"]
        tops = [pair for likeliest in (meta.input_top_logprobs or [None])[1:] for pair in (likeliest or ())[:top]]
        return TokenScores(
            as_logprobs([NO_NUMBER if logprob is None else logprob for logprob, _, _ in places]),
            as_ids([token for _, token, _ in tops] if top else []),
            as_logprobs([logprob for logprob, _, _ in tops] if top else []),
        )

    def _read_experts(self, encoded: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        experts, (layers, each) = np.frombuffer(base64.b64decode(encoded), np.int32), self._experts
        if len(experts) % (layers * each):
            raise EngineError(
                f"{self.name} sent {len(experts)} routed experts; the model has {layers} layers with {each} each"
            )
        return experts.reshape(-1, layers, each)
