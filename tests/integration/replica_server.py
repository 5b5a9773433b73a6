"""A replica in a process of its own that speaks SGLang's protocol: each token follows from those before it.

Its weights show in the logprobs alone, so rows are the same whatever happens to it, and what sampled a token can be
told from the token: ``python -m tests.integration.replica_server PORT`` (0: any, which it prints).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from tests.unit.engines.http.stand_ins import SGLangStandIn

PIECE, PAUSE = 4, 0.004  # tokens of an event, and seconds before it
UNIT = 2.0**-10  # a logprob is the version of the weights times this, negated: so exact in float32


def following(ids: Sequence[int]) -> int:
    """Return the token that comes after these."""
    return 40 + crc32(repr(tuple(ids[-3:])).encode()) % 50


class ReplicaServer(SGLangStandIn):
    """See the module."""

    def events(self, body: Any) -> Iterator[dict[str, Any]]:
        ended = self._staying[body["rid"]] = threading.Event()
        ids, most, so_far = list(body["input_ids"]), body["sampling_params"]["max_new_tokens"], 0
        prompt, stops = len(ids), set(body["sampling_params"].get("stop_token_ids") or ())
        reason: Any = None
        while reason is None:
            time.sleep(PAUSE)
            new: list[int] = []
            while len(new) < PIECE and so_far + len(new) < most and not stops.intersection(new):
                new.append(following(ids))
                ids.append(new[-1])
            if ended.is_set():
                reason, new = {"type": "abort"}, []
            so_far += len(new)
            if reason is None and (so_far == most or stops.intersection(new)):
                reason = {"type": "length"} if so_far == most else {"type": "stop", "matched": new[-1]}
            version = int(self.label) if self.label.isdigit() else 0
            yield {"output_ids": new, "meta_info": {
                "prompt_tokens": prompt, "completion_tokens": so_far, "weight_version": self.label,
                "output_token_logprobs": [(-UNIT * version, token, None) for token in new], "finish_reason": reason,
            }}  # fmt: skip


if __name__ == "__main__":
    print(ReplicaServer(int(sys.argv[1])).port, flush=True)
