"""Stands in for SGLang's GPU kernels, of which there is no build for machines without CUDA.

SGLang's CPU mode imports a few kernels and never calls them: without AMX its layers take their native forms.
"""

import sys

import torch

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in

stand_in(__name__, "a GPU kernel, and this machine has no CUDA")
# One family's model (Qwen3.5) takes these from torch as it is imported, and its processor of pictures is all families'.
for _name in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate", "qkvzba_split_reshape_cat_contiguous"):
    setattr(torch.ops.sgl_kernel, f"fused_{_name}_cpu", getattr(sys.modules[__name__], f"fused_{_name}_cpu"))
