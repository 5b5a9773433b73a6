"""`fsm-rollout serve` as its users start it: the embedded model, both protocols' clients, signals, and what is left."""

import gc
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.errors import JournalError
from fsm_rollout.jobs.control import Order, ask
from fsm_rollout.trajectory.journal import read
from tests.collector import Collector
from tests.kit import ROOT
from tests.programs import PATIENCE, started

pytestmark = pytest.mark.process
DEMO = ROOT / "configs" / "runs" / "demo.yaml"
AGENT = ROOT / "configs/agents/single_turn.yaml"


@contextmanager
def serving(place: Path, *overrides: str, ends_by: signal.Signals = signal.SIGTERM, run: Path = DEMO) -> Iterator[str]:
    """Serve a run's agent; at the end a signal ends it, with exit code 0 and nothing but its own words."""
    code = f"import signal; signal.signal({int(ends_by)}, signal.SIG_DFL)\n"  # a shell ignores it in the background
    code += "from fsm_rollout.cli import main; main()"
    options = ["--port", "0", "sampling.temperature=0", f"out={place / 'chat'}", *overrides]
    with started(code, "serve", run, *options, cwd=place, searched=()) as (process, output, errors):
        first = output.readline()
        assert first.startswith("http://127.0.0.1:"), (first, errors.read())
        yield first.split()[0]
        os.kill(process.pid, ends_by)
        said = errors.read()
        assert process.wait(PATIENCE) == 0, said
        assert "Traceback" not in said
        assert "ended; what was said: fsm-rollout show" in said


def test_both_protocols_clients_talk_to_it_and_what_was_said_is_kept(tmp_path: Path) -> None:
    import anthropic  # half a second, which only the worker that runs this needs to spend
    import openai

    chat: list[Any] = [{"role": "user", "content": "What is (20 + 22) * 2?"}]
    follow: Any = {"role": "user", "content": "What is that plus 3?"}
    question: Any = {"model": "tool_user", "max_tokens": 200, "messages": [dict(chat[0])]}
    # 1. Four ways to ask, and a follow-up.
    collector = Collector()
    with collector, serving(tmp_path, "serve.keep=false", f"tracing={collector.url}", ends_by=signal.SIGINT) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer: Any = client.chat.completions.create(model="tool_user", messages=chat)
            text = answer.choices[0].message.content
            assert "84" in text
            chunks: Any = client.chat.completions.create(model="tool_user", messages=chat, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
            chat.extend([{"role": "assistant", "content": text}, follow])
            second: Any = client.chat.completions.create(model="tool_user", messages=chat)
        assert [row["state"] for row in ask(tmp_path / "chat-serve", Order("list")).rows] == ["up"]
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
            message = other.messages.create(**question)
            with other.messages.stream(**question) as stream:
                assert "".join(stream.text_stream) == message.content[0].text == text  # type: ignore[union-attr]
    ids = {t.trajectory_id: t for t in read(tmp_path / "chat-serve" / "journal.sqlite")}
    assert len(ids) == 4
    begun = [span.name for span in collector.spans if not span.parent_span_id]  # they go on below that
    assert sorted(begun) == ["invoke_agent tool_user"] * 4 + ["invoke_workflow chat-serve"]
    assert second.trajectory in ids, "the stream had asked the same and goes on too"
    trajectory = ids[second.trajectory]
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == [m["content"] for m in chat[::2]]
    assert len(trajectory.streams) == 1
    assert trajectory.trained_tokens > 0
    # 2. It is a run's folder like any other, to all that reads one.
    folder = str(tmp_path / "chat-serve")
    shown = CliRunner().invoke(app, ["show", folder, "--trajectory", str(second.trajectory)])
    assert shown.exit_code == 0, shown.output
    assert "What is that plus 3?" in shown.output
    assert "the server has ended" in " ".join(shown.output.split())
    for command, says in (
        (["replay", folder], "4 trajectories replayed, 0 of them differ"),
        (["export", folder, "-o", str(tmp_path / "rows.jsonl")], "4 rows of 4 trajectories"),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert says in done.output
    refused = CliRunner().invoke(app, ["resume", folder])
    assert refused.exit_code == 2
    assert f"fsm-rollout serve {DEMO}" in refused.output
    page = CliRunner().invoke(app, ["show", folder, "-o", str(tmp_path / "report.html")])
    assert page.exit_code == 0, page.output


def test_replicas_that_orders_left_are_there_until_the_yaml_says_otherwise(tmp_path: Path) -> None:
    run, counts = tmp_path / "run.yaml", []
    for start, replicas in enumerate([2, 2, 2, 1, 1]):
        engine = {"kind": "scripted", "turns": ["It is 4."], "replicas": replicas}
        what = {"agent": str(AGENT), "engine": engine, "prompts": "none.jsonl", "out": "out"}
        run.write_text(json.dumps(what), "utf-8")
        with serving(tmp_path, run=run):
            if not start:
                ask(tmp_path / "chat-serve", Order("add"))
            counts.append(len(ask(tmp_path / "chat-serve", Order("list")).rows))
    assert counts == [3, 3, 3, 1, 1]


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*overrides: str) -> str:
        done = CliRunner().invoke(app, ["serve", str(DEMO), f"out={tmp_path / 'chat'}", *overrides])
        assert done.exit_code == 2, done.output
        assert "Traceback" not in done.output
        return done.output

    assert "did you mean 'waiting'" in refused("serve.wating=3")
    assert "serve.api_keys" in refused(f"serve.api_keys={tmp_path / 'none.txt'}")
    (tmp_path / "keys.txt").write_text("# none yet\n", "utf-8")
    assert "holds no key" in refused(f"serve.api_keys={tmp_path / 'keys.txt'}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "journal.sqlite").write_text(json.dumps({}), "utf-8")
    assert "holds something other than conversations" in refused(f"serve.out={tmp_path / 'other'}")
    there = set(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in refused("--port", str(port))
    assert set(tmp_path.iterdir()) == there
    with monkeypatch.context() as patched:
        patched.setattr("fsm_rollout.serve.command.Journal", Mock(side_effect=JournalError("the disk is full")))
        done = CliRunner().invoke(app, ["serve", str(DEMO), f"out={tmp_path / 'chat'}", "--port", "0"])
    assert "the disk is full" in done.output
    gc.collect()  # of what was to be served nothing is left that complains that nobody awaited it
