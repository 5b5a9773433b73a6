"""Stands in for torchvision, which SGLang imports for models that see images.

The usual build of the real one fails beside a CPU torch, and takes transformers with it.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in

stand_in(__name__, "torchvision is not installed; only text models run here")
