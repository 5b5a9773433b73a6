"""Stands in for torchvision, which SGLang imports for models that see images.

Invariant: see :mod:`fsm_rollout.engines.sglang.stand_ins.absent`. The real one is not installed beside SGLang on a
machine without CUDA: its usual build fails beside a CPU torch, and takes transformers with it.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in, submodules

_WHY = "torchvision is not installed; only text models run here"

__version__ = "0.0.0"
__getattr__ = stand_in(__name__, _WHY)
submodules(__name__, _WHY)
