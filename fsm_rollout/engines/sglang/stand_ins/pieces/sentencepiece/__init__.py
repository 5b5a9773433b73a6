"""Stands in for sentencepiece, which SGLang imports for a tokenizer of one family of models that see images.

Invariant: see :mod:`fsm_rollout.engines.sglang.stand_ins.absent`. The real one is not installed beside SGLang on a
machine without CUDA: transformers loads it wherever it is, and its 0.2.1 crashes the interpreter at exit.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in, submodules

_WHY = "sentencepiece is not installed; tokenizers are loaded outside SGLang"

__version__ = "0.0.0"
__getattr__ = stand_in(__name__, _WHY)
submodules(__name__, _WHY)
