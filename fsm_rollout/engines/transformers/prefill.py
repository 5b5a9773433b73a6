"""The log-probs of given ids under a model: prefill, and nothing sampled.

Invariant: what is said of a token is the log-softmax of the model's own forward pass over all the tokens before it,
rounding apart. What a session's earlier ids have left in its cache is not computed again, and neither is what another
session's ids begin with; caches of other weights are forgotten (:meth:`Prefill.forget`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from fsm_rollout.engines.protocol import Request
from fsm_rollout.trajectory.tokens import TokenScores, as_ids, as_logprobs

PIECE = 1024  # so many tokens go through the model at once: a logit for each token of the vocabulary is in memory
WORTH_COPYING = 32  # tokens that another session's ids begin with, from which on their cache is copied


class Prefill:
    """Scores ids, one request at a time.

    Args:
        model: a causal language model in evaluation mode.
        sessions: of so many the caches are kept.
    """

    def __init__(self, model: PreTrainedModel, sessions: int) -> None:
        self._model, self._most = model, sessions
        self._kept: OrderedDict[str, tuple[list[int], DynamicCache]] = OrderedDict()  # ids and their cache, by session

    def forget(self) -> None:
        """Keep nothing of what was computed."""
        self._kept.clear()

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Let what these sessions have left be forgotten first; until then others may begin with it."""
        for session in sessions:
            if session in self._kept:
                self._kept.move_to_end(session, last=False)

    @torch.no_grad()
    def scores(self, request: Request) -> TokenScores:
        """Return what the model makes of a request's ids from ``scored_from`` on."""
        # 1. What is computed already: at most the tokens before the first whose successor is asked for.
        ids, asked = list(request.ids), request.scored_from
        cache, start = self._begun(request.session, ids[: asked - 1])
        # 2. The rest, but for the last token, which nothing follows.
        logprobs: list[float] = []
        top_ids: list[int] = []
        top_logprobs: list[float] = []
        for begin in range(start, len(ids) - 1, PIECE):
            end = min(begin + PIECE, len(ids) - 1)
            first = max(begin, asked - 1)  # whose logits are the first that are asked for
            logits = self._logits(ids[begin:end], cache, max(1, end - first))
            if first >= end:
                continue
            given = torch.log_softmax(logits.float(), -1)
            said = torch.tensor(ids[first + 1 : end + 1], device=given.device)
            logprobs += given.gather(-1, said[:, None])[:, 0].clamp(max=0.0).tolist()
            if request.score_top:
                top = given.topk(min(request.score_top, given.shape[-1]))
                top_ids += top.indices.flatten().tolist()
                top_logprobs += top.values.clamp(max=0.0).flatten().tolist()
        # 3. What the session's next request begins with.
        if request.session:
            self._kept[request.session] = ids[:-1], cache
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return TokenScores(as_logprobs(logprobs), as_ids(top_ids), as_logprobs(top_logprobs))

    def _begun(self, session: str, ids: list[int]) -> tuple[DynamicCache, int]:
        """Return a cache that holds the first tokens of ``ids``, and how many; it is the caller's to change."""
        known, cache = self._kept.pop(session, ([], None))
        length = _common(known, ids)
        if cache is None or length < WORTH_COPYING:
            longest = max(((_common(other, ids), name) for name, (other, _) in self._kept.items()), default=(0, ""))
            if longest[0] >= max(WORTH_COPYING, length + 1):
                length, (known, cache) = longest[0], copy.deepcopy(self._kept[longest[1]])
        if cache is None or not length:
            return DynamicCache(config=self._model.config.get_text_config()), 0
        if length < len(known):
            cache.crop(length)
        return cache, length

    def _logits(self, ids: list[int], cache: Any, count: int) -> torch.Tensor:
        """Return the logits ``[count, V]`` after each of the last of ``ids``, which go on from the cache."""
        fed = torch.tensor([ids], device=self._model.device)
        logits: torch.Tensor = self._model(
            input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=count
        ).logits
        return logits[0]


def _common(known: list[int], ids: list[int]) -> int:
    """Return how many tokens two lists begin with alike."""
    if known == ids[: len(known)]:
        return len(known)
    return next((at for at, pair in enumerate(zip(known, ids, strict=False)) if pair[0] != pair[1]), len(ids))
