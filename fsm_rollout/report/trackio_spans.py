"""Spans for trackio, which takes whole traces and no OTLP.

Invariant: a trace is told once, with all of its spans that have come by then: live when its reward has come, or a while
after the trajectory has ended, and else at the end. A run that is sent again from its journal takes the place of what
was there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import StatusCode

REWARD_WITHIN = 30.0  # seconds after its trajectory's end for which a trace waits for a reward
KINDS = {"chat": "generation", "execute_tool": "tool"}
SAID = {"input": (gen_ai.GEN_AI_INPUT_MESSAGES, "gen_ai.tool.call.arguments"),
        "output": (gen_ai.GEN_AI_OUTPUT_MESSAGES, "gen_ai.tool.call.result")}  # fmt: skip
USAGE = {"input_tokens": gen_ai.GEN_AI_USAGE_INPUT_TOKENS, "output_tokens": gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS,
         "cache_read_input_tokens": "gen_ai.usage.cache_read.input_tokens"}  # fmt: skip
OPERATION = gen_ai.GEN_AI_OPERATION_NAME


class SpansToTrackio(SpanExporter):
    """Takes spans of runs, whose traces are those of runs of trackio called ``NAME-spans``.

    Args:
        project: trackio's.
        server: the address of a server of trackio's; ``None``: what it keeps on this machine.
        later: they come from a journal, all of a run in one go.
    """

    def __init__(self, project: str, server: str | None, *, later: bool) -> None:
        import trackio

        self._trackio, self._project, self._server, self._later = trackio, project, server, later
        self._runs: dict[str, Any] = {}
        self._traces: dict[int, list[ReadableSpan]] = {}  # those that were not told
        self._ended: dict[int, float] = {}  # when their trajectories did

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take some spans, and tell the traces that are whole."""
        now, whole = time.monotonic(), set[int]()
        for span in spans:
            assert span.context is not None
            trace_id = span.context.trace_id
            self._traces.setdefault(trace_id, []).append(span)
            if span.name == "reward":
                whole.add(trace_id)
            elif span.parent is None:
                self._ended[trace_id] = now
        if not self._later:
            whole |= {trace_id for trace_id, at in self._ended.items() if now - at > REWARD_WITHIN}
            self._tell([trace_id for trace_id in self._ended if trace_id in whole])
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Tell all that is left."""
        self._tell(list(self._traces))
        for run in self._runs.values():
            run.finish()
        self._runs.clear()

    def _tell(self, trace_ids: Iterable[int]) -> None:
        for trace_id in trace_ids:
            self._ended.pop(trace_id, None)
            spans = sorted(self._traces.pop(trace_id), key=lambda span: (span.start_time or 0, -(span.end_time or 0)))
            all_told = [dict[str, Any](span.attributes or {}) for span in spans]
            told = next((told for told in all_told if "experiment_name" in told), {})
            facts = {key.removeprefix("fsm_rollout."): told[key] for key in told if not key.startswith("gen_ai")}
            facts |= {"session_id": told.get(gen_ai.GEN_AI_CONVERSATION_ID), "trace_id": f"{trace_id:032x}"}
            trace = self._trackio.Trace(_conversation(spans), facts, [_told(span) for span in spans])
            self._run(str(told.get("experiment_name", "rollout"))).log({"trace": trace}, step=int(told.get("step", 0)))

    def _run(self, name: str) -> Any:
        if name not in self._runs:
            own = f"{name}-spans"
            if self._later and self._server is None:
                with suppress(ValueError):  # there is no such project
                    for run in list(self._trackio.Api().runs(self._project)):
                        if run.name == own:
                            run.delete()
            self._runs[name] = self._trackio.init(
                self._project, own, group=name, server_url=self._server, resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        return self._runs[name]


def _told(span: ReadableSpan) -> dict[str, Any]:
    """Return a span as trackio has it."""
    told, context = dict[str, Any](span.attributes or {}), span.context
    assert context is not None
    operation = told.get(OPERATION, "")
    found: dict[str, Any] = {
        "id": f"{context.span_id:016x}", "name": span.name, "kind": KINDS.get(operation, "span"),
        "parent_id": None if span.parent is None else f"{span.parent.span_id:016x}",
        "start_time": _time(span.start_time), "end_time": _time(span.end_time), "status": "success",
    }  # fmt: skip
    if span.status.status_code is StatusCode.ERROR:
        found |= {"status": "error", "error": span.status.description}
    for name, keys in SAID.items():
        said = next((told.pop(key) for key in keys if key in told), None)
        if said is not None:
            found[name] = _read(said)
    if operation == "chat":  # those of a whole trajectory would be counted twice
        found["model"] = told.get(gen_ai.GEN_AI_REQUEST_MODEL)
        found["usage"] = {name: told[key] for name, key in USAGE.items() if key in told}
    return found | {"metadata": told}


def _conversation(spans: Sequence[ReadableSpan]) -> list[dict[str, Any]]:
    """Return what was said by the end of a trajectory, as OpenAI's messages."""
    chats = [span.attributes or {} for span in spans if (span.attributes or {}).get(OPERATION) == "chat"]
    last = next((told for told in reversed(chats) if gen_ai.GEN_AI_INPUT_MESSAGES in told), {})
    said = [message for keys in SAID.values() for message in json.loads(str(last.get(keys[0], "[]")))]
    return [_message(message) for message in said]


def _message(said: dict[str, Any]) -> dict[str, Any]:
    texts, calls, more = list[str](), list[dict[str, Any]](), dict[str, Any]()
    for part in said["parts"]:
        match part:
            case {"type": "text", "content": text}:
                texts.append(text)
            case {"type": "tool_call_response", "response": text, "id": call_id}:
                texts.append(text)
                more["tool_call_id"] = call_id
            case {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}:
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": said["role"], "content": "".join(texts), **more, **({"tool_calls": calls} if calls else {})}


def _read(said: object) -> object:
    try:
        return json.loads(str(said))
    except ValueError:
        return said


def _time(nanoseconds: int | None) -> str:
    return datetime.fromtimestamp((nanoseconds or 0) / 1e9, UTC).isoformat(timespec="microseconds")
