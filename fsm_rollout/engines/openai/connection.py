"""The requests under way in one server of OpenAI's protocol.

Invariant: that of :mod:`fsm_rollout.engines.sglang.connection`, whose class this extends: while the engine is held, it
has none of our requests, so every token was sampled by the present weights as we know them. A logprob is that of the
distribution which the token was sampled from; sampling for which the server cannot say it is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fsm_rollout.engines.openai.server import CompletionsServer, LogprobsOf
from fsm_rollout.engines.protocol import SamplingParams
from fsm_rollout.engines.sglang.connection import Connection, Entry
from fsm_rollout.errors import EngineError

HOT = 2.0  # the temperature at which a server's logprobs are looked at
CERTAIN = -0.05  # tokens that are more likely than this (by logprob) do not show what a temperature changes
SAME = 1e-3  # how far two logprobs that ought to be equal may be apart


class CompletionsConnection(Connection):
    """See the module."""

    server: CompletionsServer
    logprobs_of = LogprobsOf.MODEL  # what the server's logprobs are of
    reload: Callable[[], Awaitable[None]] | None = None  # loads the last weights again, if any were loaded from here

    async def meet_model(self, max_context: int | None, probes: Sequence[int]) -> None:
        """Learn what the server is: its model, its window, and what its logprobs are of.

        ``probes`` are tokens to ask it about, tried in turn.

        Raises:
            EngineError: it is not there, answers with text only, or does not say how long its window is.
        """
        window = await self.server.ask_model()
        if max_context is None and window is None:
            raise EngineError(f"{self.server.url} does not say how long its window is; give `max_context`")
        self.max_context = min(size for size in (max_context, window) if size is not None)
        for probe in probes:
            greedy = await self._probe(probe, temperature=0.0)
            if greedy[1] < CERTAIN:
                # Only the likeliest token is left by so small a top_p, whatever the temperature.
                hot = await self._probe(probe, temperature=HOT, top_p=1e-6)
                if hot[0] != greedy[0]:
                    continue
                if abs(hot[1]) < SAME:
                    self.logprobs_of = LogprobsOf.SAMPLER
                elif abs(hot[1] - greedy[1]) > SAME:
                    self.logprobs_of = LogprobsOf.TEMPERATURE
                return

    async def _probe(self, token: int, **sampling: float) -> tuple[int, float]:
        """Sample one token after ``token``, and return it with its logprob."""
        body = self._asked([token], 1) | sampling | {"rid": f"probe-{token}"}
        sampled: list[tuple[int, float]] = []
        try:
            async for ids, meta in self.server.stream(body):
                sampled += [(id_, logprob) for id_, (logprob, *_) in zip(ids, meta.output_token_logprobs, strict=True)]
        except ValueError as error:
            raise EngineError(f"{self.server.url} refuses to sample one token: {error}") from error
        if len(sampled) != 1:
            raise EngineError(f"{self.server.url} was asked for one token and gave {len(sampled)}")
        return sampled[0]

    def _asked(self, ids: Sequence[int], max_tokens: int) -> dict[str, object]:
        return {
            "model": self.server.model, "prompt": ids, "max_tokens": max_tokens, "logprobs": 0,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip

    def _body(self, entry: Entry) -> dict[str, object]:
        """Write a request in the protocol's words, with the extensions that vLLM and SGLang share."""
        params = entry.request.sampling
        if (why := self._inexact(params)) is not None:
            raise ValueError(why)
        body = self._asked(entry.ids.tolist(), entry.room)
        body |= {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed % 2**63}
        body |= {"top_k": params.top_k} if params.top_k else {}
        body |= {"ignore_eos": True} if params.ignore_eos else {"stop_token_ids": sorted(params.stop_ids)}
        return body | {"rid": entry.rid}

    def _inexact(self, params: SamplingParams) -> str | None:
        """Return why the server cannot say the logprobs of such sampling, or ``None``."""
        if self.logprobs_of is LogprobsOf.SAMPLER or params.temperature == 0:
            return None
        if self.logprobs_of is LogprobsOf.MODEL and params.temperature != 1:
            return (
                f"the server's logprobs are of the model before temperature, so at temperature {params.temperature:g} "
                f"they are not those of what is sampled; use 1, or start vLLM with --logprobs-mode processed_logprobs"
            )
        if params.top_p < 1 or params.top_k:
            return (
                "the server's logprobs do not know of top_p and top_k; leave these out, or start vLLM with "
                "--logprobs-mode processed_logprobs (for SGLang there is `kind: sglang_http`)"
            )
        return None

    async def sleep(self) -> None:
        """Send nothing until :meth:`wake`; the protocol has no way to have memory given back."""
        await self.check_idle()
        await self._hold("asleep")

    async def wake(self) -> None:
        """Send what waits."""
        self._release("asleep")

    async def _check_weights(self) -> None:
        """Give a server that may have been restarted the last weights again: it does not say which ones it has."""
        await self.server.ask_model()
        if self.reload is not None:
            await self.reload()

    async def update_by(self, load: Callable[[], Awaitable[None]], version: int, *, again: bool) -> None:
        """Have weights loaded while the server has no request of ours; ``again``: also after it was lost."""
        await self._hold("updating")
        try:
            await load()
            self.version = version
            if again:
                self.reload = load
        finally:
            self._release("updating")
