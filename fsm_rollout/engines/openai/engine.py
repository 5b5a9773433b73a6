"""Any server with OpenAI's ``/v1/completions`` that takes and gives token ids: vLLM (from 0.10.2), SGLang and others.

Invariants: tokens are exact, ids in and ids out; a server that gives text only is refused when the engine is built. The
logprobs are those of what was sampled: what a server's logprobs are of is found out by asking it, and sampling that it
cannot give them for is refused, request by request (vLLM's default knows temperature 1 only; started with
``--logprobs-mode processed_logprobs`` it knows all).

Beside the protocol:

- A request is aborted by closing its connection. What the server had sampled and not sent by then is not known.
- New weights are loaded by a function of the user's (``update_weights``), as the protocol has no way for that. It must
  also have the server forget its prefix cache, and whoever owns the engine has it called again after the server was
  lost. A vLLM in its development mode reads a folder by itself, takes adapters, gives memory back, and says its
  version. Else there is one version for good, and ``sleep`` only holds requests back.
- The prompt is known to have been read as it was sent: `usage.prompt_tokens` is asked for with every event
  (``stream_options``), and where a server gives ``prompt_token_ids``, these are compared, too. One that says neither
  with its first tokens is refused.
- Per-request seeds are sent; whether they are kept is the server's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.http.engine import HTTPEngine
from fsm_rollout.engines.http.lora import half_loaded_if
from fsm_rollout.engines.openai.endpoint import CompletionsEndpoint, LoadWeights
from fsm_rollout.engines.protocol import HalfLoaded
from fsm_rollout.engines.updating import ServerAddress
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import model_folder
from fsm_rollout.names.objects import load_object

PROBES = 8  # how many tokens a server is asked about at most, to find out what its logprobs are of


class OpenAIEngine(HTTPEngine):
    """See the module.

    Args:
        url: where the server is, with or without ``/v1``.
        model: a model folder with the tokenizer and configuration of the model served.
        served_as: what the server calls the model; default: the only one that it has.
        replica: a name that every chunk carries; default: the url.
        api_key: what the server demands; ``$NAME`` is read from the environment.
        max_context: the longest input plus output; default: what the server says.
        update_weights: ``module:function``, or a function ``(url, weights, version)``, that loads new weights.

    Raises:
        EngineError: there is no such folder or function, no such server at the url, or it answers with text only.
    """

    _endpoint: CompletionsEndpoint

    def __init__(
        self,
        url: str,
        model: str | Path = "embedded",
        *,
        served_as: str | None = None,
        replica: str | None = None,
        api_key: str | None = None,
        max_context: int | None = None,
        update_weights: str | LoadWeights | None = None,
    ) -> None:
        found = load_object(update_weights) if isinstance(update_weights, str) else update_weights
        if found is not None and not callable(found):
            raise EngineError(f"update_weights: '{update_weights}' is no function")
        super().__init__(model_folder(model, weights=False))
        endpoint = CompletionsEndpoint(url, api_key, served_as, found)
        self._connect(endpoint, replica)
        probes = [*sorted(self.eos_ids)[:1], *range(1, PROBES)]  # SGLang takes [0] for an empty prompt
        self._link.version = self._meet(endpoint.meet(max_context, probes))

    @property
    def address(self) -> ServerAddress:
        """Where the server is; how many processes it has is not known here."""
        return ServerAddress(self._endpoint.url, self._endpoint.api_key, 1)

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """See :class:`~fsm_rollout.engines.adapters.AdapterSink`; servers as vLLM take them."""
        await self._step(partial(self._endpoint.load_adapter, adapter.folder, version), version)

    async def begin_update(self, known: Mapping[str, object], *, local: bool) -> None:
        """Send the server nothing until the update has ended; see :func:`fsm_rollout.engines.updating.updating`."""
        if not self._endpoint.is_vllm:
            raise EngineError(
                f"{self._endpoint.url} has no routes of vLLM's to end an update; start it with VLLM_SERVER_DEV_MODE=1"
            )
        await self._step(_nothing)

    async def end_update(self, version: int | None) -> None:
        """Go on with what the trainer has loaded; ``None``: it has not."""
        if version is None:
            raise HalfLoaded(f"{self._endpoint.url} may have a part of new weights")

        async def end() -> None:
            with half_loaded_if(lambda: True):
                await self._endpoint.call_weights(str(version))
            await self._endpoint.forget_adapter()

        await self._step(end, version)


async def _nothing() -> None:
    """Do nothing."""
