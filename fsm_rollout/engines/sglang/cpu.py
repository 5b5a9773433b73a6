"""SGLang on a machine without CUDA; the one place that knows how.

Invariant: nothing here acts when torch has CUDA. Without, stand-in modules (``stand_ins``: the GPU kernels, torchvision
and sentencepiece, where they are not installed; text models call none), a few environment variables and a few arguments
make SGLang 0.5.21 to 0.5.23 run in full, in float32.

    python -m fsm_rollout.engines.sglang.cpu --model-path PATH --port 30000

is ``python -m sglang.launch_server`` with all that, for trying the engine kind ``sglang_http``.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

# Arguments of SGLang's `ServerArgs`; others may be given over them.
ARGUMENTS: Mapping[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",  # the default on x86 needs AMX
    "mm_attention_backend": "sdpa",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "lora_backend": "torch_native",  # used with enable_lora only
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 32_768,
    "max_running_requests": 64,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # else an idle engine keeps a core busy, which another one could use
}


def prepare(threads: int | None, ranks: int = 1) -> Mapping[str, object]:
    """Make ``import sglang`` work in this process and those it starts, and return the arguments to start from.

    Args:
        threads: of each of SGLang's processes; default 1, as small models on few cores are fastest that way.
        ranks: how many processes hold parts of the model.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if threads is not None or not has_cuda:
        os.environ["OMP_NUM_THREADS"] = str(threads or 1)
    if has_cuda:
        return {}
    sys.path.append(str(Path(__file__).parent / "stand_ins"))  # last: what is installed goes first
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # else its rotary embedding imports vLLM
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if ranks > max(1, nodes):  # by itself SGLang gives each rank one of these, and refuses more
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of(ranks, threads or 1))
    # SGLang's processes are forked: started anew, as SGLang asks for (CUDA needs that), each imports for 8 s.
    torch.set_num_threads(threads or 1)  # what they inherit; torch has read the environment by now
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    # A torch that was built for CUDA takes that for its device, also where there is none: SGLang could not sleep.
    # Its compiler looks at what the function wraps.
    module_of = torch.get_device_module
    vars(torch)["get_device_module"] = functools.wraps(module_of)(lambda device="cpu": module_of(device))
    # The memory in which SGLang records routed experts is registered with CUDA; on a CPU there is nothing to register.
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, allocator, **_: allocator.allocate(
        dims, dtype=dtype, device=device
    )
    return ARGUMENTS


def unpin() -> None:
    """Have SGLang's LoRA run without CUDA: it asks for memory that is pinned for a GPU wherever it makes a tensor."""
    import torch

    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros"):
        make = vars(torch)[name]
        vars(torch)[name] = functools.wraps(make)(
            lambda *values, make=make, pin_memory=False, **options: make(*values, **options)
        )
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def cores_of(ranks: int, threads: int) -> str:
    """Return the cores of each rank, as SGLang reads them: as many as its threads, and others than its neighbour's."""
    cores = sorted(os.sched_getaffinity(0))
    numbers = [[cores[(rank * threads + thread) % len(cores)] for thread in range(threads)] for rank in range(ranks)]
    return "|".join(",".join(map(str, dict.fromkeys(of_rank))) for of_rank in numbers)


def launch_server(arguments: list[str]) -> None:
    """Run SGLang's server in this process with command-line ``arguments`` of its own."""
    present = {argument.split("=")[0] for argument in arguments}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1, dest="tp")
    for name, value in prepare(None, parser.parse_known_args(arguments)[0].tp).items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in present:
            arguments = [*arguments, flag] if value is True else [*arguments, flag, str(value)]
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    launch_server(sys.argv[1:])
