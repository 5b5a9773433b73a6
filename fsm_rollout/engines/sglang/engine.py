"""SGLang behind the engine protocol, as a server of our own (:mod:`fsm_rollout.engines.sglang.process`).

Invariant: the server is spoken to like any other (:mod:`fsm_rollout.engines.sglang.http`). When its process dies, for
whatever reason, all that is under way and all that is asked later ends with an EngineError that shows the end of its
output.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.sglang.endpoint import SGLangEndpoint
from fsm_rollout.engines.sglang.forms import KEPT_BY_SGLANG
from fsm_rollout.engines.sglang.weights import SGLangServer
from fsm_rollout.engines.weights import check_weights_there
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import config_number, load_processor, model_folder

logger = logging.getLogger(__name__)

ADDRESS = {"host", "port", "api_key"}
STREAMING = {"skip_tokenizer_init", "incremental_streaming_output", "stream_interval"}
# Arguments of SGLang that this engine sets itself.
OWN_ARGUMENTS = {"model_path", "weight_version"} | ADDRESS | STREAMING
# Those with which a model sees pictures: a picture is decoded and processed once, and known again by its hash.
PICTURES = {"enable_multimodal": True, "mm_preprocess_cache_size_mb": 512, "trust_mm_content_hashes": True}
# Those that choose a cache which knows no sessions.
OTHER_CACHES = {"disable_radix_cache", "radix_cache_backend", "enable_flexkv", "enable_lmcache"}
READY_EVERY = 0.1  # seconds between two looks whether a server that starts is ready
PROGRESS_EVERY = 15.0  # seconds between two lines in the log while SGLang starts


class SGLangEngine(SGLangServer):
    """See the module.

    Args:
        model: ``embedded``, ``embedded:early``, the path of a model folder, or a name of the hub.
        device: default: SGLang's choice with CUDA, else the CPU.
        dtype: default: the checkpoint's own with CUDA, float32 on a CPU.
        max_context: the longest input plus output, in tokens; default: the model's window less what SGLang keeps.
        max_running: how many requests decode together; the others wait. Default: SGLang's choice.
        tp: how many GPUs hold one copy of the model; on a CPU, how many processes.
        mem_fraction: SGLang's ``mem_fraction_static``, the part of a GPU's memory for weights and cache.
        threads: of each of SGLang's processes (``OMP_NUM_THREADS``); default: 1 on a CPU, else left alone.
        send_every: tokens between two chunks of a request. What a lost replica had not sent is sampled again elsewhere.
        deterministic: per-request seeds and batch-invariant kernels, slower; GPUs only.
        start_timeout: seconds that SGLang has to start.
        args: further arguments of SGLang's ``ServerArgs`` by their names there.
        replica: a name that every chunk carries.

    Raises:
        EngineError: SGLang is not installed, the model cannot be found or served, an argument does not exist, or it
            does not start in time.

    An update of the weights takes effect between two tokens; ``sleep`` gives the cache's memory back (with
    ``args: {enable_memory_saver: true}``; the weights' too with ``enable_weights_cpu_backup: true``).
    """

    def __init__(
        self,
        model: str | Path = "embedded",
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        max_running: int | None = None,
        tp: int = 1,
        mem_fraction: float | None = None,
        threads: int | None = None,
        send_every: int = 8,
        deterministic: bool = False,
        start_timeout: float = 300.0,
        args: Mapping[str, object] | None = None,
        replica: str = "",
    ) -> None:
        # 1. What can be known before anything starts.
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("SGLang is not installed; pip install 'fsm-rollout[sglang]' (README says how on a CPU)")
        from fsm_rollout.engines.sglang.process import ServerProcess  # needs what comes with SGLang

        args = args or {}
        if reserved := sorted(OWN_ARGUMENTS & args.keys()):
            raise EngineError(f"args: {', '.join(reserved)}: the engine sets this itself; leave it out")
        folder = model_folder(model)
        if "load_format" not in args:
            check_weights_there(folder)
        super().__init__(folder)
        processor = load_processor(folder)
        # 2. SGLang's arguments; what is not said here is its own choice.
        window = config_number(folder, "max_position_embeddings") or sys.maxsize
        context = None if max_context is None else min(max_context + KEPT_BY_SGLANG, window)
        choices = {
            "device": device,
            "dtype": dtype,
            "context_length": context,
            "max_running_requests": max_running,
            "mem_fraction_static": mem_fraction,
            "enable_deterministic_inference": deterministic or None,
        }
        arguments = {
            "model_path": str(folder),
            "skip_tokenizer_init": args.get("grammar_backend", "none") == "none",  # a grammar is of text
            "incremental_streaming_output": True,
            "weight_version": "0",
            "tp_size": tp,
            "log_level": "error",
            **({} if OTHER_CACHES & args.keys() else {"enable_session_radix_cache": True}),
            **(PICTURES if processor is not None else {}),
            **{name: value for name, value in choices.items() if value is not None},
            **args,
        }
        # 3. The server.
        self._process = ServerProcess(arguments, threads)
        url, api_key = self._process.url, self._process.api_key
        endpoint = SGLangEndpoint(url, api_key, folder, send_every, processor=processor, alone=True)
        self._connect(endpoint, replica, self._process)
        self._route(endpoint)
        try:
            self._await_start(endpoint, start_timeout)
        except BaseException:
            self._stop()
            raise
        endpoint.max_context = min(max_context or sys.maxsize, endpoint.max_context)

    def _await_start(self, endpoint: SGLangEndpoint, timeout: float) -> None:
        """Wait until SGLang has started, saying so now and then; EngineError if it fails, or the time is up."""
        began = time.monotonic()
        ready = self._link.do(self._ready(endpoint))
        while (waited := time.monotonic() - began) < timeout:
            try:
                return wait_for(ready, min(PROGRESS_EVERY, timeout - waited))
            except TimeoutError:
                waited = time.monotonic() - began
                logger.info("SGLang is starting '%s': %.0f of at most %.0f s", self._folder, waited, timeout)
            except EngineError as error:
                raise EngineError(f"SGLang cannot serve '{self._folder}': {error}") from None
        raise self._process.failure(
            f"SGLang did not start '{self._folder}' within {timeout:g} s; raise start_timeout, or see what it waits for"
        )

    async def _ready(self, endpoint: SGLangEndpoint) -> None:
        """Wait until the server is ready, and meet it; EngineError if its process ends."""
        while not self._process.exited.done():
            with suppress(EngineError):
                await endpoint.call("/ready")
                break
            await asyncio.sleep(READY_EVERY)
        else:
            raise self._process.failure()
        await endpoint.meet()
        # SGLang asks itself, unless it is too busy for 10 s. Then a flush on a CPU walks through all of its objects.
        # With an ``admin_api_key`` it is not ours to ask for, and it serves without.
        with suppress(EngineError):
            await endpoint.call("/freeze_gc", {})
