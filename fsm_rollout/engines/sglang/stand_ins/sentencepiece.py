"""Stands in for sentencepiece, which SGLang imports for a tokenizer of one family of models that see images.

transformers loads the real one wherever it is installed, and its 0.2.1 crashes the interpreter at exit.
"""

from fsm_rollout.engines.sglang.stand_ins.absent import stand_in

stand_in(__name__, "sentencepiece is not installed; tokenizers are loaded outside SGLang")
