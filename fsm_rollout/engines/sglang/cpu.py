"""SGLang on a machine without CUDA; the one place that knows how.

Invariant: nothing here acts when torch has CUDA. Without, two stand-in modules (``sglang_stand_ins``: the GPU kernels,
torchvision and sentencepiece, where they are not installed; text models call none), a few environment variables and a
few arguments make SGLang 0.5.21 run in full, in float32.

    python -m fsm_rollout.engines.sglang.cpu --model-path PATH --port 30000

is ``python -m sglang.launch_server`` with all that, for trying the engine kind ``sglang_http``.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_STAND_INS = Path(__file__).parent / "stand_ins"

ARGUMENTS: Mapping[str, object] = MappingProxyType(
    {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",  # the default on x86 needs AMX
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 32_768,
        "max_running_requests": 64,
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # else an idle engine keeps a core busy, which another one could use
    }
)
"""Arguments of SGLang's ``ServerArgs``; others may be given over them."""


def has_cuda() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def _stand_ins() -> list[str]:
    """Return the folders whose modules stand in for what is not there."""
    wanted = {"kernels": "sgl_kernel", "vision": "torchvision", "pieces": "sentencepiece"}
    return [str(_STAND_INS / folder) for folder, name in wanted.items() if importlib.util.find_spec(name) is None]


def prepare(threads: int | None) -> Mapping[str, object]:
    """Make ``import sglang`` work in this process and those it starts, and return the arguments to start from.

    Args:
        threads: of each of SGLang's processes; default 1, as small models on few cores are fastest that way.
    """
    if threads is not None or not has_cuda():
        os.environ["OMP_NUM_THREADS"] = str(threads or 1)
    if has_cuda():
        return {}
    sys.path[:0] = _stand_ins()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # else its rotary embedding imports vLLM
    return ARGUMENTS


def launch_server(arguments: list[str]) -> None:
    """Run SGLang's server in this process with command-line ``arguments`` of its own."""
    given = {argument.split("=")[0] for argument in arguments}
    for name, value in prepare(None).items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in given:
            arguments = [*arguments, flag] if value is True else [*arguments, flag, str(value)]
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def serve(arguments: Mapping[str, object]) -> None:
    """Run SGLang's server in this process with ``arguments`` of its ``ServerArgs``.

    What ``sglang.launch_server`` does; but SGLang's processes import the present main module again, not that one.
    """
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**arguments))


if __name__ == "__main__":
    launch_server(sys.argv[1:])
