"""What is asked of a server with OpenAI's ``/v1/completions``, and what its answers mean.

Invariants: tokens are ids both ways; a server that answers with text only is refused, with the reason, and text is
never encoded again. A logprob is that of the distribution which the token was sampled from; sampling for which the
server cannot say it is refused. Closing the connection ends a request, which is how servers of this protocol are told
to.

vLLM's own routes, for weights, adapters and memory, are asked only where a server has answered them. They are those of
its development mode (``VLLM_SERVER_DEV_MODE=1``; adapters with ``--enable-lora`` and
``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``). What is known of their answers is what its modules
``entrypoints/serve/dev/{rlhf,sleep,cache,rpc}/api_router.py`` and ``entrypoints/serve/lora/api_router.py`` write at
commit 0100a2129224: they were read, and not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from fsm_rollout.engines.http.endpoint import (
    MEMORY_WITHIN,
    NO_NUMBER,
    UPDATE_WITHIN,
    AnswerPart,
    Entry,
    number_of,
    refusal_in,
    second_answer,
    shown,
)
from fsm_rollout.engines.http.lora import AdaptedEndpoint, half_loaded_if, name_of
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, SamplingParams, Weights
from fsm_rollout.engines.sglang.forms import KEPT_BY_SGLANG
from fsm_rollout.engines.weights import check_folder
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import model_folder
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import TokenScores, as_ids, as_logprobs

# `update(url, weights, version)`, sync or async: loads a folder or tensors into the server at `url`.
LoadWeights = Callable[..., Awaitable[None] | None]
OWN = frozenset({"n", "best_of", "echo", "stop", "min_p", "top_k", "ignore_eos", "stop_token_ids"})
HOT = 2.0  # the temperature at which a server's logprobs are looked at
CERTAIN = -0.05  # tokens that are more likely than this (by logprob) do not show what a temperature changes
SAME = 1e-3  # how far two logprobs that ought to be equal may be apart


class LogprobsOf(StrEnum):
    """What distribution a server's logprobs are of; found out by asking it."""

    MODEL = "model"
    """The model's own, before temperature, top_k and top_p (vLLM's default)."""
    TEMPERATURE = "temperature"
    """After temperature, before top_k and top_p (SGLang's)."""
    SAMPLER = "sampler"
    """The one sampled from (vLLM's ``--logprobs-mode processed_logprobs``)."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Event(msgspec.Struct):
    """One line of an answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | str | None = None


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str | None


_decode_event = msgspec.json.Decoder(_Event).decode


class CompletionsEndpoint(AdaptedEndpoint):
    """One server.

    Args:
        model: what the server calls its model; default: the only one that it has.
        load: what loads new weights into it.
    """

    name, kind, described = "the server", "server", "a server of OpenAI's protocol"
    health, generate = "/v1/models", "/v1/completions"

    def __init__(self, url: str, api_key: str | None, model: str | None, load: LoadWeights | None) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v1"), api_key)
        self._model = model or ""
        self._load = load
        self._logprobs_of = LogprobsOf.MODEL  # what the server's logprobs are of
        self.is_vllm = self._says_version = False  # whether it has vLLM's own routes, and a number for its weights

    async def meet(self, max_context: int | None, probes: Sequence[int]) -> int:
        """Learn what the server is: its model, its window, and what its logprobs are of; return its weights' version.

        ``probes`` are tokens to ask it about, tried in turn.

        Raises:
            EngineError: it is not there, lacks the model, answers with text only, or does not say how long its window
                is or how it reads a prompt.
        """
        cards = (await self.ask("/v1/models", _Models)).data
        names = [card.id for card in cards]
        if not self._model and len(cards) == 1:
            self._model = names[0]
        if self._model not in names:
            wanted = (
                f"has no model '{self._model}'" if self._model else "has several models, so name one by `served_as`"
            )
            raise EngineError(f"{self.url} {wanted}; it has {', '.join(names) or 'none'}")
        card = cards[names.index(self._model)]
        window = card.max_model_len
        if window is not None and card.owned_by == "sglang":  # which cuts longer prompts, and answers those
            window -= KEPT_BY_SGLANG
        if max_context is None and window is None:
            raise EngineError(f"{self.url} does not say how long its window is; give `max_context`")
        self.max_context = min(size for size in (max_context, window) if size is not None)
        self.is_vllm = await self._answers("/is_sleeping", _Sleeping)
        self._says_version = self.is_vllm and await self._answers("/weight_info", _WeightInfo)
        label = await self._label()
        for probe in probes:
            greedy = await self._probe(probe, temperature=0.0)
            if greedy[1] < CERTAIN:
                # Only the likeliest token is left by so small a top_p, whatever the temperature.
                hot = await self._probe(probe, temperature=HOT, top_p=1e-6)
                if hot[0] != greedy[0]:
                    continue
                if abs(hot[1]) < SAME:
                    self._logprobs_of = LogprobsOf.SAMPLER
                elif abs(hot[1] - greedy[1]) > SAME:
                    self._logprobs_of = LogprobsOf.TEMPERATURE
                break
        return number_of(label)

    async def loader(self, weights: Weights) -> Callable[[int], Awaitable[None]]:
        """Return a call of the user's function, or of vLLM's route; no tensors at all are a new version only."""
        function = self._load
        changes = not isinstance(weights, Mapping) or bool(weights)
        if changes and function is None and (not self.is_vllm or isinstance(weights, Mapping)):
            raise EngineError(
                f"OpenAI's protocol has no way to load weights into {self.url}; name a function that does it: "
                "`update_weights: module:function`, called with the url, the weights and their version; or start vLLM "
                "with VLLM_SERVER_DEV_MODE=1, which then reads folders"
            )
        folder = None
        if changes and function is None and not isinstance(weights, Mapping):
            folder = model_folder(weights).resolve()
            await asyncio.to_thread(check_folder, folder)

        async def load(version: int) -> None:
            if changes and function is not None:
                try:
                    await invoke(function, {"url": self.url, "weights": weights, "version": version})
                except Exception as error:  # the user's code
                    raise EngineError(f"update_weights failed: {type(error).__name__}: {error}") from error
            if folder is not None:  # under the same path, in all its processes
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await self.call("/collective_rpc", call, within=UPDATE_WITHIN)
            with half_loaded_if(lambda: changes):
                await self.call_weights(str(version))
            await self.forget_adapter()

        return load

    async def adopt(self, version: int, *, doubted: bool, adapted: bool | None) -> None:
        """See :class:`Endpoint`."""
        label = await self._label()
        if label is None:
            await super().adopt(version, doubted=doubted, adapted=adapted)
            label = name_of(version) if (self.adapter if adapted is None else adapted) else str(version)
        if not self.adopted(label, version, adapted):
            raise HalfLoaded(f"{self.url} has weights of version '{label}', and not {version}, as was loaded into all")

    async def refuses(self, what: str, body: Mapping[str, object]) -> str:
        """See :class:`AdaptedEndpoint`."""
        try:
            await self.call(f"/v1/{what}_lora_adapter", body, within=UPDATE_WITHIN)
        except ReplicaLost:
            raise
        except EngineError as error:
            return str(error)
        return ""

    async def call_weights(self, label: str) -> None:
        """See :class:`AdaptedEndpoint`; what it has computed is forgotten."""
        if self.is_vllm:
            await self.call("/reset_prefix_cache", {})
        if self._says_version:
            await self.call("/update_weight_version", {"new_version": label})

    async def sleep(self) -> None:
        """Have vLLM give memory back, its weights moved to the host's; the protocol has no way to."""
        if self.is_vllm:
            await self.call("/sleep?level=1", {}, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        """Have it take the memory again."""
        if self.is_vllm:
            await self.call("/wake_up", {}, within=MEMORY_WITHIN)

    async def _label(self) -> str | None:
        """Return what it calls its weights; ``None``: it does not say."""
        return str((await self.ask("/weight_info", _WeightInfo)).weight_version) if self._says_version else None

    async def _answers(self, path: str, form: type[object]) -> bool:
        try:
            await self.ask(path, form)
        except ReplicaLost:
            raise
        except EngineError:
            return False
        return True

    async def _probe(self, token: int, **sampling: float) -> tuple[int, float]:
        """Sample one token after ``token``, and return it with its logprob."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        try:
            async for part in self.stream(as_ids([token]), self._asked([token], 1) | sampling):
                ids += part.ids
                logprobs += part.logprobs
        except ReplicaLost:
            raise
        except EngineError as error:
            raise EngineError(f"{self.url} refuses to sample one token: {error}") from error
        if len(ids) != 1 or len(logprobs) != 1 or logprobs[0] is None:
            raise EngineError(f"{self.url} was asked for one token and gave {len(ids)} with logprobs {logprobs}")
        return ids[0], logprobs[0]

    def _asked(self, ids: Sequence[int], max_tokens: int) -> dict[str, object]:
        return {
            "model": self.adapter or self._model, "prompt": ids, "max_tokens": max_tokens, "logprobs": 0,
            "return_token_ids": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip

    def body(self, entry: Entry) -> dict[str, object]:
        """Write a request in the protocol's words, with the extensions that vLLM and SGLang share."""
        request, params = entry.request, entry.request.sampling
        if request.scored_from:  # which the protocol calls an echo of the prompt
            if request.score_top:
                raise EngineError(
                    "OpenAI's protocol names the likeliest tokens by their texts, which are not their ids; leave the "
                    "teacher's top_k out, or use `kind: sglang_http`"
                )
            return self._asked(entry.ids.tolist(), 1) | {"echo": True, "logprobs": 1, "temperature": 1.0}
        if (why := self._inexact(params)) is not None:
            raise EngineError(why)
        body = self._asked(entry.ids.tolist(), entry.room)
        body |= {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed % 2**63}
        body |= {"top_k": params.top_k} if params.top_k else {}
        body |= params.penalties | ({"min_p": params.min_p} if params.min_p else {})
        if taken := sorted(params.extra.keys() & (body.keys() | OWN)):
            raise EngineError(f"sampling.extra: {', '.join(taken)} is set by the engine itself; leave it out")
        body |= params.extra
        return body | ({"ignore_eos": True} if params.ignore_eos else {"stop_token_ids": sorted(params.stop_ids)})

    def _inexact(self, params: SamplingParams) -> str | None:
        """Return why the server cannot say the logprobs of such sampling, or ``None``."""
        if self._logprobs_of is LogprobsOf.SAMPLER:
            return None
        if params.bends:
            return (
                "the server's logprobs may not know of penalties; leave these out, or start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        if params.temperature == 0:
            return None
        if self._logprobs_of is LogprobsOf.MODEL and params.temperature != 1:
            return (
                f"the server's logprobs are of the model before temperature, so at temperature {params.temperature:g} "
                f"they are not those of what is sampled; use 1, or start vLLM with --logprobs-mode processed_logprobs"
            )
        if params.cuts:
            return (
                "the server's logprobs do not know of top_p, top_k and min_p; leave these out, or start vLLM with "
                "--logprobs-mode processed_logprobs (for SGLang there is `kind: sglang_http`)"
            )
        return None

    def read_part(self, event: bytes, body: Mapping[str, Any]) -> AnswerPart:
        """Read one event; ReplicaLost for one that has text instead of ids."""
        try:
            read = _decode_event(event)
        except msgspec.MsgspecError as error:
            raise self.unreadable(event, str(error)) from None
        if read.error is not None:
            raise refusal_in(read.error)
        prompt_tokens = None if read.usage is None else read.usage.prompt_tokens
        if not read.choices:  # the last event of some servers: what all has cost
            return AnswerPart(prompt_tokens=prompt_tokens)
        choice = read.choices[0]
        if len(read.choices) > 1 or choice.index:
            raise second_answer(self.url)
        reason = None if choice.finish_reason is None else FinishReason(choice.finish_reason)
        logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        if "echo" in body:  # the prompt's come first, in the first event; the token after them may be one that stops
            reason = FinishReason.LENGTH if reason is FinishReason.STOP else reason
            part = AnswerPart(finish_reason=reason, prompt_tokens=prompt_tokens, prompt_ids=choice.prompt_token_ids)
            if len(logprobs) >= len(body["prompt"]):
                scores = [NO_NUMBER if logprob is None else logprob for logprob in logprobs[: len(body["prompt"])]]
                part.scores = TokenScores(as_logprobs(scores))
            return part
        if choice.token_ids is None:
            raise ReplicaLost(
                f"{self.url} answers with text only: there are no `token_ids` in its answer, though "
                f"`return_token_ids` was asked for. Training needs the sampled ids; text encoded again gives others. "
                f"vLLM (from 0.10.2) and SGLang give them; its answer was {shown(event)}"
            )
        return AnswerPart(
            choice.token_ids,
            logprobs,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            prompt_ids=choice.prompt_token_ids,
        )
