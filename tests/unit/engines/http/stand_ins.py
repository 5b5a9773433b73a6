"""Servers in little, for what a real one cannot be made to do: they speak as much as the engines ask, and wrongly.

The tokens of :class:`SGLangStandIn` are its weights' number, so what sampled a token can be told from the token.
:class:`VLLMStandIn` has a small random model. The lines that it writes are those that ``completion_stream_generator``
of ``vllm/entrypoints/openai/serving_completion.py`` writes (repository vllm-project/vllm, commit
00463e627b4cbe549b5e9815a2bdb0100ae88ea9, November 2025, after 0.11): field for field, with the nulls that
``model_dump_json(exclude_unset=False)`` leaves in.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import random
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FIRST, EARLY = 11, 22
"""The tokens that the weights which an SGLang stand-in starts with, and those that it is given, sample."""
WINDOW = 512
TOKENS = range(20, 36)
"""What the model of vLLM's stand-in ever says, beside the stop token."""
STOP = 2


class StandIn(socketserver.ThreadingTCPServer):
    """One life of a server."""

    allow_reuse_address = True
    daemon_threads = True
    generate: str

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.port = int(self.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[tuple[str, Any]] = []
        """The paths that were asked for, and the bodies."""
        self.raw: dict[str, bytes] = {}
        """What is said to some paths instead of an answer."""
        self.headers: dict[str, str] = {}
        """What stands in the head of each answer."""
        self.never: set[str] = set()
        """Paths that are never answered."""
        self.twist: Callable[[dict[str, Any]], object] = lambda event: None
        """What is made of the events of an answer."""
        self.broken_off = 0
        """How many answers were broken off by whoever asked."""
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self.shutdown()
            self._thread.join()
            self.server_close()

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def answer(self, path: str, body: Any) -> Any:
        """Return what is answered, or (status, that)."""
        raise NotImplementedError

    def events(self, body: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of the answer to a generation."""
        raise NotImplementedError


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        server.asked.append((path, body))
        if path in server.never:
            server.over.wait()
        elif path in server.raw:
            self.wfile.write(server.raw[path])
        elif path == server.generate and body.get("stream"):
            self.send_response(200)
            self.end_headers()
            try:
                for event in server.events(body):
                    server.twist(event)
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            except ConnectionError:
                server.broken_off += 1
        else:
            found = server.answer(path, body)
            status, content = found if isinstance(found, tuple) else (200, found)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)


class SGLangStandIn(StandIn):
    generate = "/generate"

    def __init__(self, port: int = 0) -> None:
        self.token, self.label = FIRST, "default"
        self.loaded: list[tuple[str, str]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        """What it has loaded from handles."""
        self.reads: int | None = None
        """How many tokens it reads of a prompt with a picture; ``None``: it was not started for these."""
        self.refusal: str | None = None
        """Why it takes no weights."""
        self.info: dict[str, object] = {}
        """What else it says of itself."""
        self.used = [0]
        self.counted_at: float | None = None  # when; default: just now
        """How many tokens its ranks have in requests, as it says."""
        self.stays = False
        """Whether a generation goes on after its first token until it is aborted."""
        self._staying: dict[str, threading.Event] = {}
        super().__init__(port)

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "/server_info":
                return {"max_req_input_len": 1000, **self.info}
            case "/model_info":
                return {"weight_version": self.label, "has_image_understanding": self.reads is not None}
            case "/v1/loads":
                counted = time.time() if self.counted_at is None else self.counted_at
                return {"loads": [{"timestamp": counted, "num_used_tokens": used} for used in self.used]}
            case "/generate":  # to whoever does not stream
                event = self._event(body, 1, {"type": "length"})
                event["meta_info"]["prompt_tokens"] = self.reads
                return event
            case "/update_weights_from_disk" if self.refusal is not None:
                return 400, {"success": False, "message": self.refusal}
            case "/update_weights_from_disk":
                self.token, self.label = EARLY, body["weight_version"]
                self.loaded.append((body["model_path"], self.label))
            case "/update_weights_from_tensor" if self.refusal is not None:
                return 400, {"success": False, "message": self.refusal}
            case "/update_weights_from_tensor":
                assert body["load_format"] == "flattened_bucket"
                (handle,) = body["serialized_named_tensors"]
                bucket = pickle.loads(base64.b64decode(handle))
                for piece in bucket["metadata"]:
                    flat = bucket["flattened_tensor"][piece.start_idx : piece.end_idx]
                    self.tensors[piece.name] = flat.view(piece.dtype).view(piece.shape).clone()
                self.token = EARLY
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/abort_request":
                for rid, ended in self._staying.items():
                    if body.get("abort_all") or rid.startswith(body["rid"]):
                        ended.set()
        return {"success": True}

    def events(self, body: Any) -> Iterator[dict[str, Any]]:
        count = body["sampling_params"]["max_new_tokens"]
        if self.stays:
            ended = self._staying[body["rid"]] = threading.Event()
            yield self._event(body, 1, None)
            while not (ended.wait(0.1) or self.over.is_set()):
                pass
            yield self._event(body, 0, {"type": "abort"}, so_far=1)
        else:
            yield self._event(body, count, {"type": "length"})

    def _event(self, body: Any, count: int, reason: Any, so_far: int = 0) -> dict[str, Any]:
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count + so_far,
            "output_token_logprobs": [(-0.5, self.token, None)] * count,
            "weight_version": self.label,
            "finish_reason": reason,
        }
        return {"output_ids": [self.token] * count, "meta_info": meta}


def logits_after(ids: Sequence[int]) -> dict[int, float]:
    """The model: some scores that depend on the last two tokens."""
    rng = random.Random(repr(tuple(ids[-2:])))
    return {token: rng.uniform(0, 3) for token in (*TOKENS, STOP)}


def log_softmax(logits: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    scaled = {token: value / temperature for token, value in logits.items()}
    total = math.log(sum(math.exp(value) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}


def cut(logprobs: dict[int, float], top_k: int, top_p: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token, value in sorted(logprobs.items(), key=lambda item: -item[1])[: top_k or None]:
        if sum(math.exp(v) for v in kept.values()) > top_p:
            break
        kept[token] = value
    total = math.log(sum(math.exp(value) for value in kept.values()))
    return {token: value - total for token, value in kept.items()}


class VLLMStandIn(StandIn):
    generate = "/v1/completions"

    def __init__(self) -> None:
        self.logprobs_mode = "raw_logprobs"
        self.says_usage = self.says_prompt_ids = True
        self.next_events: list[dict[str, Any]] = []
        """Said instead of the next answer."""
        self.models, self.owner = ["tiny"], "vllm"
        self.development: dict[str, Any] | None = None
        """What its own routes answer, by their paths, in its development mode (vLLM at 0100a2129224)."""
        super().__init__()

    def answer(self, path: str, body: Any) -> Any:
        if self.development is not None and path != "/v1/models":
            if path == "/update_weight_version":
                self.development["/weight_info"] = {"weight_version": body["new_version"]}
            return self.development.get(path, (404, {"detail": "Not Found"}))
        cards = [
            {"id": name, "object": "model", "owned_by": self.owner, "max_model_len": WINDOW} for name in self.models
        ]
        return {"object": "list", "data": cards}

    def events(self, body: Any) -> Iterator[dict[str, Any]]:
        if self.next_events:
            yield from (self.next_events.pop(0) for _ in range(len(self.next_events)))
            return
        ids, seed = list(body["prompt"]), body.get("seed", 0)
        prompt, reason = len(ids), None
        echoed = [None, *(self._scored(ids[:at], ids[at]) for at in range(1, prompt))] if body.get("echo") else []
        usage = self.says_usage and body["stream_options"]["continuous_usage_stats"]
        while reason is None:
            token, logprob = self._sample(ids, body, random.Random(f"{seed}/{len(ids)}"))
            ids.append(token)
            if not body.get("ignore_eos") and token in body.get("stop_token_ids", {STOP}):
                reason = "stop"
            elif len(ids) - prompt == body["max_tokens"] or len(ids) == WINDOW:
                reason = "length"
            choice = {
                "index": 0, "text": "x", "finish_reason": reason,
                "logprobs": {
                    "text_offset": [0], "token_logprobs": [*echoed, logprob], "tokens": ["x"],
                    "top_logprobs": [{"x": logprob}],
                },
                "stop_reason": token if reason == "stop" else None,
                "prompt_token_ids": body["prompt"] if self.says_prompt_ids and len(ids) == prompt + 1 else None,
                "token_ids": [token] if body.get("return_token_ids") else None,
            }  # fmt: skip
            spent = {"prompt_tokens": prompt, "total_tokens": len(ids), "completion_tokens": len(ids) - prompt}
            line = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
            yield line | {"choices": [choice], "usage": spent if usage else None}
            echoed = []
            self.over.wait(0.001)  # so that an abort comes while it samples

    def _scored(self, before: list[int], token: int) -> float:
        return log_softmax(logits_after(before)).get(token, -9.0)  # it never says other ones

    def _sample(self, ids: list[int], body: dict[str, Any], rng: random.Random) -> tuple[int, float]:
        logits = logits_after(ids)
        raw = log_softmax(logits)
        temperature = body.get("temperature", 1.0)
        if temperature == 0:
            token = max(raw, key=lambda token: raw[token])
            return token, raw[token]
        hot = log_softmax(logits, temperature)
        kept = cut(hot, body.get("top_k", 0), body.get("top_p", 1.0))
        (token,) = rng.choices(list(kept), [math.exp(value) for value in kept.values()])
        return token, {"raw_logprobs": raw, "processed_logprobs": kept, "sglang": hot}[self.logprobs_mode][token]


class ChatStandIn(StandIn):
    """A provider of a chat API: it gives written answers in turn, whatever it is asked."""

    generate = ""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__()
        self.headers = {"Content-Type": "application/json", "Retry-After": "0"}
        self.answers = iter(answers)

    def answer(self, path: str, body: Any) -> Any:
        return next(self.answers)
