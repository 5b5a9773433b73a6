"""What an error says of the output of a process that has ended."""

import pytest
import torch

from fsm_rollout.engines.sglang.process import OUTPUT_LINES, _check, explained

REASON = "the process of SGLang has ended (exit code -9)"
CRASH = (
    "[2026-01-02 03:04:05] Subprocess scheduler_0 (pid=71) crashed with exit code -9. Triggering SIGQUIT for cleanup"
)
NOISE = [
    "/lib/python/transformers/x.py:84: FutureWarning: `torch_dtype` is deprecated! Use `dtype` instead!",
    "  warnings.warn(",
    "[2026-01-02 03:04:05] WARNING server_args.py:99: No platform detected.",
    "W0102 03:04:05.000000 71 torch/distributed/run.py:766] OMP_NUM_THREADS",
    "Loading safetensors: 0%|          | 0/1 [00:00<?, ?it/s]\rLoading: 100%|███| 1/1 [00:01<00:00, 1.2s/it]",
]


def test_the_line_that_tells_most_is_first_and_noise_is_left_out():
    text = explained(REASON, "\n".join([*NOISE, "something odd", CRASH, "", *NOISE, "bye"]))
    assert text.splitlines() == [f"{CRASH} ({REASON}); the end of its output:", "something odd", CRASH, "bye"]


def test_the_last_error_of_a_traceback_tells():
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "torch.OutOfMemoryError: CUDA is full",
    ]
    first = explained(REASON, "\n".join(["ValueError: an earlier one", *trace, *NOISE])).splitlines()[0]
    assert first == f"torch.OutOfMemoryError: CUDA is full ({REASON}); the end of its output:"


def test_where_nothing_tells_the_reason_comes_first():
    assert explained(REASON, "") == REASON
    assert explained(REASON, "hello\n") == f"{REASON}; the end of its output:\nhello"
    assert explained("ValueError: no", "ValueError: no\n").startswith("ValueError: no; the end")
    only = explained(REASON, "\n".join(NOISE))  # noise is better than nothing
    assert only.splitlines()[1:] == [line for text in NOISE for line in text.splitlines()]


def test_long_output_is_cut_but_not_the_line_that_tells():
    lines = explained(REASON, "\n".join([CRASH, *(f"line {i}" for i in range(100))])).splitlines()
    assert lines[0].startswith(CRASH)
    assert lines[1:] == [f"line {i}" for i in range(100 - OUTPUT_LINES, 100)]


def test_a_gpu_that_is_not_there_is_said_before_sglang_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"EngineError: device 'cuda' is not there: torch .* sees no CUDA; leave"):
        _check({"device": "cuda"}, ["device"])
