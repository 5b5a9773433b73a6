"""What runs in a Ray actor, without Ray: an engine that has not every plane is left alone, as one here is."""

from typing import Any

import pytest

from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import EngineError
from tests.embedded import tokenizer

pytest.importorskip("ray")

from fsm_rollout.engines.ray import ReplicaActor


class TokensAlone:
    """A source of tokens, whose weights and sleep are its owner's."""

    def __init__(self) -> None:
        self._engine = ScriptedEngine(["a"], tokenizer=tokenizer())
        for name in ("tokenizer", "max_context", "eos_ids", "weight_version", "generate", "abort", "load", "aclose"):
            setattr(self, name, getattr(self._engine, name))


async def test_what_an_engine_does_not_have_is_not_asked_of_it() -> None:
    made: Any = TokensAlone
    actor = ReplicaActor("replica-0", lambda name: made())
    await actor.start(False)
    for order in ("pause", "resume", "sleep", "wake"):
        await actor.ask(order)
    with pytest.raises(EngineError, match="changed by their owner"):
        await actor.ask("update_weights", {}, 1)
    await actor.ask("aclose")
