"""How a run's agents are served: the key ``serve`` of a run YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fsm_rollout.trajectory.settings import AtLeastOne, Seconds, StrictModel

SERVED = "served"
"""The journal's word for conversations, which are no run's."""


class ServeConfig(StrictModel):
    """Where agents are served, to whom, and how much of it."""

    host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1", description="the address to listen at; 0.0.0.0 is every one of this machine"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="0: any that is free")
    api_keys: Path | None = Field(
        None,
        description="a file with one key per line, relative to the run's; callers must send one, and reach only "
        "conversations that were begun with it",
    )
    waiting: AtLeastOne = Field(
        1000, description="conversations that wait for their callers' next messages; beyond that the oldest ends"
    )
    wait_seconds: Seconds = Field(3600.0, description="so long a conversation waits for the next message, then it ends")
    keep: bool = Field(
        True, description="conversations that wait when the server ends go on when it is started again; false: they end"
    )
    body_bytes: AtLeastOne = Field(4 * 2**20, description="the longest body of a request")
    out: Path | None = Field(
        None, description="the folder of the conversations, relative to where the command is given; default: OUT-serve"
    )
