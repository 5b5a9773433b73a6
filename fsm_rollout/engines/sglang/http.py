"""An SGLang server behind the engine protocol; one URL is one engine.

Invariant: that of :mod:`fsm_rollout.engines.http.engine`; and every answer says which version sampled it, so no token
of another version is ever taken for one of ours; once new weights may have reached it, it samples nothing for us until
it has whole ones under a version. They are checked before the server hears of them, and it reads them from a folder,
this host's memory or a broadcast.

Tokens are exact (ids in, ids out), also through a server that has its own tokenizer. What SGLang (0.5.21 to 0.5.23)
was found to do, beyond or beside the protocol:

- Logprobs are after temperature and before top_k and top_p. Where these cut, the renormalised logprob of SGLang's
  sampling mask is used, which is exact; a top_p without a top_k then cuts at 3,840 tokens as well (at the whole
  vocabulary where that is smaller). With speculative decoding there is no mask: such a request fails.
- A server started with ``--enable-return-routed-experts`` says at the end of a request which experts each token was
  routed to, the last one apart; it is asked for those of the tokens of which it has not been said before, so a turn
  costs what is new in it. Their layers and numbers are read from the model folder's config.
- Pictures are sent beside ids, one placeholder for each, and SGLang expands these (Qwen's families exactly). What it
  makes of one is compared when the engine is built, and on each request; where that is not what the model's processor
  makes, the model reads text only here, as the log says.
- Penalties are applied a token late and do not count the prompt; their log-probs are near what was sampled from, not
  exact.
- Per-request seeds (promise 5) need ``deterministic``, which exists on GPUs only. Without it sampling above
  temperature 0 is not reproducible; greedy sampling is, up to rounding in batches of different shapes.
- A request is known to be admitted by its first output, so its time in the queue includes its prefill.
- The model's own stop tokens end a generation even when a request's ``stop_ids`` lack them.
- The longest input plus output is the model's window less 6 tokens, which SGLang keeps for itself.
- SGLang tells which weights sampled which token only when a request ends, so updates and pauses take requests back and
  send them again; their prefix is computed again after an update.
- ``sleep`` and ``update_weights`` are for servers that serve nobody else at that moment. Answers travel as JSON; a
  server with ``--incremental-streaming-output --skip-tokenizer-init`` sends each token once.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from fsm_rollout.engines.protocol import Load
from fsm_rollout.engines.sglang.endpoint import SGLangEndpoint
from fsm_rollout.engines.sglang.others import OtherUsers
from fsm_rollout.engines.sglang.weights import SGLangServer
from fsm_rollout.model.folders import load_processor, model_folder


class SGLangHTTPEngine(SGLangServer):
    """See the module.

    Args:
        url: where the server is, such as ``http://localhost:30000``.
        model: a model folder with the tokenizer of the model served.
        send_every: tokens between two chunks of a request.
        replica: a name that every chunk carries; default: the url.
        api_key: what the server was started with, if it was.

    Raises:
        EngineError: there is no such folder, or no SGLang server at the url.
    """

    def __init__(
        self,
        url: str,
        model: str | Path = "embedded",
        *,
        send_every: int = 8,
        replica: str | None = None,
        api_key: str | None = None,
    ) -> None:
        folder = model_folder(model, weights=False)
        super().__init__(folder)
        endpoint = SGLangEndpoint(url, api_key, folder, send_every, processor=load_processor(folder))
        self._connect(endpoint, replica)
        self._route(endpoint)
        self._link.version = self._meet(endpoint.meet())
        self._others = OtherUsers(self._link, endpoint, send_every)
        self._link.do(self._others.watch())

    def load(self) -> Load:
        """Return how busy the server is with what came from here, and with what others have asked for."""
        return replace(super().load(), others=self._others.tokens)
