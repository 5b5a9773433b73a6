"""What SGLang's servers are forked with: all that the server, its scheduler and its detokenizer import."""

import logging
import warnings

from fsm_rollout.engines.sglang import cpu

cpu.prepare(1)
logging.disable()  # what each model would need that it does not find
with warnings.catch_warnings(action="ignore"):
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.plugins
    import sglang.srt.server_args  # noqa: F401
logging.disable(logging.NOTSET)
