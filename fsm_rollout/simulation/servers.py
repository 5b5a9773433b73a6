"""The simulated servers of a simulation, in blocks of tokens.

Invariant: a server that counts in blocks takes as long, and keeps as much, as one that counts in tokens, but for what
is rounded: a step of it is ``block`` steps, in which each request says a block.
"""

from __future__ import annotations

from pydantic import Field

from fsm_rollout.engines.protocol import Load
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.trajectory.settings import StrictModel


class ServerCosts(StrictModel):
    """A server's memory and pace, in tokens and seconds.

    The defaults are a model of 4 billion parameters in bfloat16 (36 layers, 8 heads of 128 for keys and values, so
    147 kB per token) on a GPU with 80 GB at 3.35 TB/s: 60 GB are left for keys and values; a step reads the 8 GB of
    weights (2.4 ms, and as much again for all that comes with a step) and what requests keep (44 ns per token); filling
    takes 8 GFLOP per token, at 400 TFLOP/s. A token is priced by the GPU's hour.
    """

    tokens: int = Field(400_000, ge=1)
    """tokens that a server has room for"""
    fill_tokens: int = Field(8192, ge=1)
    """tokens of prompts that are filled in one batch"""
    fill: float = Field(2e-5, ge=0)
    """seconds to fill one token"""
    step: float = Field(5e-3, ge=0)
    """seconds of a step, which samples one token of each request"""
    step_request: float = Field(2e-5, ge=0)
    """seconds more for each running request"""
    step_token: float = Field(4.4e-8, ge=0)
    """seconds more for each token that they have"""
    max_running: int = Field(256, ge=1)
    """requests that a server runs at once"""
    hour: float = Field(3.0, ge=0)
    """what an hour of a server costs"""

    def in_blocks(self, block: int, *, sessions: bool = True) -> Memory:
        """Return the same server as one that counts in blocks."""
        return Memory(
            tokens=max(1, self.tokens // block), sessions=sessions, fill_tokens=max(1, self.fill_tokens // block),
            fill=self.fill * block, step=self.step * block, step_request=self.step_request * block,
            step_token=self.step_token * block * block,
        )  # fmt: skip


class SilentEngine(SimulatedEngine):
    """One that does not say how much it has room for, as before trajectories were resident."""

    def load(self) -> Load:
        """Say how busy it is, and no more."""
        load = super().load()
        return Load(load.running, load.waiting, load.used_tokens)
