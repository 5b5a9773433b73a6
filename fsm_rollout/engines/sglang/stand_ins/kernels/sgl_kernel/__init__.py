"""Stands in for SGLang's GPU kernels, of which there is no build for machines without CUDA.

Invariant: see :mod:`fsm_rollout.engines.sglang.stand_ins.absent`. SGLang's CPU mode imports a few kernels and never
calls them: without AMX its layers take their native forms.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in, submodules

_WHY = "a GPU kernel, and this machine has no CUDA"

__version__ = "0.0.0"
__getattr__ = stand_in(__name__, _WHY)
submodules(__name__, _WHY)
