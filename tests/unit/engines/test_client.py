"""A run's way to its engine: its own requests, and what may be new weights."""

import asyncio
from typing import Any

import numpy as np
import pytest

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import TokenStream
from tests.cases import cases
from tests.unit.engines.kit import ask, run, scripted


@cases("engines")
def test_what_are_no_new_weights_is_refused(weights: Any, version: int | None, says: str) -> None:
    async def body(client: EngineClient) -> int:
        assert type(await client.update_weights({}, np.int64(2))) is int
        with pytest.raises(EngineError, match=says):
            await client.update_weights(weights, version)
        return client.weight_version

    assert run(scripted(Turn(text="yes")), body) == 2


def test_the_last_weight_version_is_the_last_that_a_batch_can_tell() -> None:
    async def body(client: EngineClient) -> int:
        last = await client.update_weights({}, 2**31 - 1)
        tokens = TokenStream([1], state="GENERATING")
        tokens.append([2], [-1.0], state="GENERATING", turn=0, version=last)
        assert tokens.response_versions().tolist() == [last]
        with pytest.raises(EngineError, match="got 2147483648"):
            await client.update_weights({})
        return client.weight_version

    assert run(scripted(Turn(text="yes")), body) == 2**31 - 1


def test_clients_of_one_engine_know_their_own_requests_alone() -> None:
    async def body(mine: EngineClient) -> None:
        other, pending = EngineClient(mine.pool), mine.submit(ask("a"))
        come = asyncio.Event()
        pending.on_tokens = lambda _: come.set()
        await come.wait()
        assert mine.waits_of("a") == [pending]
        assert mine.sampling_since() == {("a", "main"): 0}
        assert (other.waits_of("a"), other.sampling_since()) == ([], {})

    run(scripted(Turn(text="yes", delay=1.0, chunks=2)), body)
