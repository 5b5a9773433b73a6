"""Stands in for SGLang's GPU kernels, of which there is no build for machines without CUDA.

SGLang's CPU mode imports a few kernels and never calls them: without AMX its layers take their native forms.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in

stand_in(__name__, "a GPU kernel, and this machine has no CUDA")
