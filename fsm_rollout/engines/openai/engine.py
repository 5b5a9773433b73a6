"""Any server with OpenAI's ``/v1/completions`` that takes and gives token ids: vLLM (from 0.10.2), SGLang and others.

Invariants: tokens are exact, ids in and ids out; a server that gives text only is refused when the engine is built. The
logprobs are those of what was sampled: what a server's logprobs are of is found out by asking it, and sampling that it
cannot give them for is refused, request by request (vLLM's default knows temperature 1 only; started with
``--logprobs-mode processed_logprobs`` it knows all).

Beside the protocol:

- A request is aborted by closing its connection. What the server had sampled and not sent by then is not known.
- New weights are loaded by a function of the user's (``update_weights``), as the protocol has no way for that. It must
  also have the server forget its prefix cache, and it is called again after the server was lost. Without one there is
  one version for good.
- ``sleep`` only holds requests back: the protocol has no way to have a server give memory back.
- Per-request seeds are sent; whether they are kept is the server's business.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.openai.connection import CompletionsConnection
from fsm_rollout.engines.openai.server import CompletionsServer
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model.config import config_number
from fsm_rollout.model.folders import model_folder
from fsm_rollout.names.objects import load_object
from fsm_rollout.tools.bounded_call import invoke

if TYPE_CHECKING:
    import torch

PROBES = 8  # how many tokens a server is asked about at most, to find out what its logprobs are of
# `update(url, weights, version)`, sync or async: loads a folder or tensors into the server at `url`.
LoadWeights = Callable[..., Awaitable[None] | None]


class OpenAIEngine(SGLangHTTPEngine):
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

    _connection: CompletionsConnection

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
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"'{url}' is no url of a server; write it as http://HOST:PORT")
        if api_key is not None and api_key.startswith("$"):
            name, api_key = api_key[1:], os.environ.get(api_key[1:])
            if api_key is None:
                raise EngineError(f"api_key: the environment has no {name}; set it where the run is started")
        found = load_object(update_weights) if isinstance(update_weights, str) else update_weights
        if found is not None and not callable(found):
            raise EngineError(f"update_weights: '{update_weights}' is no function")
        self._load_weights: LoadWeights | None = found
        self._read_model(model_folder(model))
        self._closed = False
        server = CompletionsServer(url, served_as, api_key)
        self._connection = CompletionsConnection(
            server, url if replica is None else replica, config_number(self._folder, "vocab_size")
        )
        self._stop = weakref.finalize(self, self._connection.stop)
        probes = [*sorted(self.eos_ids)[:1], *range(1, PROBES)]  # SGLang takes [0] for an empty prompt
        try:
            wait_for(self._connection.do(self._connection.meet_model(max_context, probes)))
        except BaseException:
            self._stop()
            raise

    @property
    def weight_version(self) -> int:
        """How many updates went through here."""
        return self._connection.version

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Have the user's function load the weights; with no tensors at all there is only a new version.

        Raises:
            EngineError: there is no such function, or it failed: the server is believed to have its old weights.
        """
        connection, function = self._connection, self._load_weights
        changes = not isinstance(weights, Mapping) or bool(weights)
        if changes and function is None:
            raise EngineError(
                f"OpenAI's protocol has no way to load weights into {connection.server.url}; name a function that does "
                "it: `update_weights: module:function`, called with the url, the weights and their version"
            )
        version = self.weight_version + 1 if version is None else version
        number = version

        async def load() -> None:
            if not changes or function is None:
                return
            try:
                await invoke(function, {"url": connection.server.url, "weights": weights, "version": number})
            except Exception as error:  # the user's code
                raise EngineError(f"update_weights failed: {type(error).__name__}: {error}") from error

        await self._order(lambda: connection.update_by(load, number, again=changes))
        return version
