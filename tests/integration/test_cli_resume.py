"""`fsm-rollout resume`: an interrupted run comes to what it would have come to, and nothing is done twice."""

import gzip
import json
import signal
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsm_rollout import TrajectoryBatch
from fsm_rollout.cli import app
from fsm_rollout.jobs import runner
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute, resume
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.scheduler.run_counts import SampleKey
from fsm_rollout.trajectory.events import AnyEvent, Called, Ended, Generated, Prompted, Resumed, Suspended
from fsm_rollout.trajectory.journal import Journal, JournalFolder, histories, metadata, read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES, PROGRAMS
from tests.kit import CONFIGS, ROOT
from tests.programs import fsm_rollout, program

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'
RUN: dict[str, Any] = {
    "agent": str(CONFIGS / "agents/tool_agent.yaml"),
    "prompts": "prompts.jsonl",
    "n": 2,
    "concurrency": 3,
    "engine": {"kind": "scripted", "turns": [CALL, CALL, "The answer is 3."]},
    "reward": "fsm_rollout.rewards:first_answer",
    "out": "OUT",
}

AS_ONE = (  # what commands say of a run in shards
    ("rescore", "8 scores, 0 of them changed", "--reward", "fsm_rollout.rewards:first_answer"),
    ("replay", "8 trajectories replayed, 0 of them differ"), ("show", "ended: answered 8"),
    ("export", "8 rows of 8 trajectories", "--format", "jsonl"),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path) -> Path:
    """Write a run into a folder."""
    prompts = [{"messages": [{"role": "user", "content": f"What is 1 + 2? ({i})"}], "answer": 3} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    path = folder / "run.yaml"
    path.write_text(json.dumps(RUN | {"out": str(folder / "out")}), "utf-8")
    return path


class Ear:
    """Listens, and presses Ctrl-C at the so-manieth event of a kind."""

    def __init__(self, kind: type[AnyEvent] | None = None, at: int = 0) -> None:
        self.kind, self.left, self.heard = kind, at, list[AnyEvent]()
        self.shown = (0, 0)

    @contextmanager
    def __call__(self, total: int, ended: Collection[SampleKey]) -> Iterator[Listener]:
        self.shown = (total, len(ended))
        yield self.hear

    def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
        self.heard.append(event)
        if self.kind is not None and isinstance(event, self.kind):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted() -> Iterator[None]:
    """Hear a Ctrl-C, also where a shell has made this process deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def rows(folder: Path) -> dict[str, Any]:
    """Return what a run came to, without what clocks say."""
    batch = TrajectoryBatch.load(folder / "batch").tensordict
    names = ("input_ids", "response_mask", "rollout_log_probs", "trajectory_scores", "group_id", "stop_reason")
    return {name: batch[name].tolist() if hasattr(batch[name], "tolist") else list(batch[name]) for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run comes to when nothing happens to it."""
    execute(load_run(run := written(tmp_path_factory.mktemp("whole"))), Ear())
    return rows(run.parent / "out")


@pytest.mark.parametrize(
    ("kind", "at"), [(Prompted, 1), (Prompted, 5), (Generated, 1), (Generated, 10), (Called, 3), (Ended, 1), (Ended, 8)]
)
def test_ctrl_c_and_on_again(run: Path, whole: dict[str, Any], kind: type[AnyEvent], at: int) -> None:
    begun = time.time()
    with interrupted(), pytest.raises(KeyboardInterrupt):
        execute(load_run(run), Ear(kind, at))
    out = run.parent / "out"
    run_id = metadata(out)["run_id"]
    left = list(histories(out / "journal.sqlite"))
    stands = [Trajectory.fold(events) for events in left]
    assert {t.stop_reason or t.suspended for t in stands} <= {"answered", "interrupted"}
    ended = sum(trajectory.ended for trajectory in stands)
    assert len(list(out.iterdir())) == 1, "only the journal"
    ear = Ear()
    summary = resume(out, [], ear)
    assert ear.shown == (8, ended)
    assert (summary["trajectories"], summary["stop_reasons"]) == (8, {"answered": 8})
    assert rows(out) == whole
    again = [event for event in ear.heard if isinstance(event, Generated | Called)]
    had = sum(isinstance(e, Generated | Called) for events in left for e in events)
    assert had + len(again) == 8 * 5, "nothing is sampled or called twice"
    epochs = [e.epoch for events in histories(out) for e in events if isinstance(e, Prompted | Resumed)]
    assert begun <= min(epochs) <= max(epochs) <= time.time(), "what its clocks mean in the world"
    assert metadata(out)["run_id"] == run_id
    assert len(list(read(out / "journal.sqlite"))) == 8


def test_an_unfinished_run_is_not_replaced_unasked(run: Path, whole: dict[str, Any]) -> None:
    with interrupted(), pytest.raises(KeyboardInterrupt):
        execute(load_run(run), Ear(Called, 1))
    before = (run.parent / "out" / "journal.sqlite").read_bytes()
    done = CliRunner().invoke(app, ["run", str(run)])
    assert done.exit_code == 2
    assert "fsm-rollout resume" in done.output
    assert (run.parent / "out" / "journal.sqlite").read_bytes() == before
    assert CliRunner().invoke(app, ["run", str(run), "--replace"]).exit_code == 0
    assert rows(run.parent / "out") == whole
    before = (run.parent / "out" / "journal.sqlite").read_bytes()
    done = CliRunner().invoke(app, ["run", str(run)])
    assert done.exit_code == 2, "what has ended is not replaced unasked either"
    assert "holds a finished run of 8 trajectories" in done.output
    assert f"out={run.parent / 'out-2'}" in done.output
    assert "--replace" in done.output
    assert (run.parent / "out" / "journal.sqlite").read_bytes() == before
    (run.parent / "out-2").mkdir()
    assert f"out={run.parent / 'out-3'}" in CliRunner().invoke(app, ["run", str(run)]).output


def test_a_whole_run_is_only_written_again(run: Path, whole: dict[str, Any]) -> None:
    out = run.parent / "out"
    execute(load_run(run), Ear())
    (out / "summary.json").unlink()
    moved = out.rename(run.parent / "elsewhere")
    ear = Ear()
    resume(moved, [], ear)
    assert (ear.heard, rows(moved)) == ([], whole)
    assert (moved / "summary.json").exists()


def test_a_run_that_was_killed_goes_on(run: Path, whole: dict[str, Any]) -> None:
    """Nothing is cleaned up then: the journal's log is left beside it, and visits are cut off in their middle."""
    text = PROGRAMS["stops where the fourth call has its result"]
    done = program(text, run)
    assert (done.returncode, done.stderr) == (9, "")
    out = run.parent / "out"
    assert (out / "journal.sqlite-wal").exists()
    assert any(not isinstance(events[-1], Ended | Suspended) for events in histories(out / "journal.sqlite"))
    resume(out, [], Ear())
    assert rows(out) == whole


@pytest.mark.process
@pytest.mark.real
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_in_shards_goes_on_from_all_their_journals(how: signal.Signals, run: Path, whole: dict[str, Any]) -> None:
    """It ends while its first group is handed over, and others are at their second turn."""
    late = {"kind": "scripted", "turns": [CALL, {"text": CALL, "delay": 0.3}, "The answer is 3."], "max_running": 2}
    run.write_text(json.dumps(json.loads(run.read_text("utf-8")) | {"workers": 2, "engine": late}), "utf-8")
    out, done = run.parent / "out", program(PROGRAMS["ends while its first group is handed over"], run, str(int(how)))
    assert done.returncode != 0
    assert len(JournalFolder(out).journals()) == 3, done.stderr
    left = list(histories(out))
    assert any(not isinstance(events[-1], Ended) for events in left)
    done = fsm_rollout("resume", out)
    assert done.returncode == 0, done.stderr
    assert rows(out) == whole
    assert len(list(read(out))) == json.loads((out / "summary.json").read_text("utf-8"))["trajectories"] == 8
    for verb, says, *options in AS_ONE:
        shown = CliRunner().invoke(app, [verb, str(out), *options])
        assert (shown.exit_code, says in " ".join(shown.output.split())) == (0, True), shown.output


def refused(folder: Path, *overrides: str) -> str:
    done = CliRunner().invoke(app, ["resume", str(folder), *overrides])
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def test_what_cannot_go_on_says_why(run: Path, whole: dict[str, Any]) -> None:
    out = run.parent / "out"
    assert "there is no journal" in refused(out)
    execute(load_run(run), Ear())
    before = (out / "journal.sqlite").read_bytes()
    assert "did you mean 'seed'" in refused(out, "sed=4")
    assert "agent 'tool_agent' is not what it was" in refused(out, "agent.limits.tool_calls=3")
    assert "kindd" in refused(out, "engine.kindd=x")
    prompts = run.parent / "prompts.jsonl"
    lines = prompts.read_text("utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:3]), "utf-8")
    assert "prompt '3' is not among the prompts" in refused(out)
    prompts.write_text("".join([*lines[:3], lines[0].replace("(0)", "(9)")]), "utf-8")
    assert "prompt '3' is not among the prompts" in refused(out)
    prompts.unlink()
    assert "prompts.jsonl" in refused(out)
    assert (out / "journal.sqlite").read_bytes() == before
    with Journal(run.parent / "mine" / "journal.sqlite"):
        pass
    assert "a program wrote it, and not `fsm-rollout run`" in refused(run.parent / "mine")


@pytest.mark.parametrize("command", ["resume", "run --replace"])
def test_a_run_that_is_going_on_is_left_alone(run: Path, whole: dict[str, Any], command: str) -> None:
    answers: list[str] = []

    class Meanwhile(Ear):
        def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
            if not answers:
                verb, *options = command.split()
                target = run.parent / "out" if verb == "resume" else run
                done = fsm_rollout(verb, target, *options)
                answers.append(f"{done.returncode} {done.stderr}")

    execute(load_run(run), Meanwhile())
    assert answers[0].startswith("2 ")
    assert "is still going on (process " in answers[0]
    assert rows(run.parent / "out") == whole
    assert not (run.parent / "out" / "run.lock").exists()


def test_a_run_goes_on_behind_a_journal_that_is_closed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the run's until its results are in place, and from before its engines are built."""
    folder = run.parent / "out"
    answers: list[str] = []

    def replace(moment: str) -> None:
        done = fsm_rollout("run", run, "--replace")
        answers.append(f"{moment}: {done.returncode} {done.stderr.partition(' (')[0]}")

    report = runner.write_report
    check = runner.check_parts
    monkeypatch.setattr(runner, "check_parts", lambda *given: (replace("before"), check(*given)))
    monkeypatch.setattr(runner, "write_report", lambda *a, **k: (replace("after"), report(*a, **k)))
    execute(load_run(run), Ear())
    refusal = f"2 out: '{folder}' holds a run that is still going on"
    assert answers == [f"before: {refusal}", f"after: {refusal}"]
    assert (folder / "report.html").exists()


PREEMPTED = PROGRAMS["is told to end at its fourth call, twice"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_run_that_is_told_to_end_is_suspended(run: Path, whole: dict[str, Any], name: str) -> None:
    done = program(PREEMPTED, run, name)
    out = run.parent / "out"
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    assert f"interrupted by {name}; to continue: fsm-rollout resume {out}" in done.stderr
    assert "Traceback" not in done.stderr
    stands = list(read(out / "journal.sqlite"))
    assert {trajectory.suspended for trajectory in stands if not trajectory.ended} == {"interrupted"}
    assert [file.name for file in out.iterdir()] == ["journal.sqlite"]
    resume(out, [], Ear())
    assert rows(out) == whole


def test_the_command_line_goes_on_and_leaves_what_has_ended_as_it_is(run: Path, whole: dict[str, Any]) -> None:
    out = run.parent / "out"
    with interrupted(), pytest.raises(KeyboardInterrupt):
        execute(load_run(run, ["concurrency=2"]), Ear(Called, 1))
    done = CliRunner().invoke(app, ["resume", str(out), "engine.max_running=2"])
    assert done.exit_code == 0, done.output
    assert "answered 8" in done.output
    assert f"code is imported as {run} names it" in done.stderr
    assert f"{run} says now is not what the run began with, and goes on with: concurrency 2 (there 3)\n" in done.stderr
    assert rows(out) == whole
    # Another time there is nothing to do, whatever it would be done with; a reward that failed is asked again.
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    again = CliRunner().invoke(app, ["resume", str(out), "engine.max_running=4"])
    assert (again.exit_code, again.stdout) == (0, done.stdout), again.output
    assert "nothing is left to do" in again.stderr
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    (out / "summary.json").write_text(json.dumps(summary | {"reward_errors": ["0/0: it failed"]}), "utf-8")
    assert "nothing is left" not in CliRunner().invoke(app, ["resume", str(out)]).stderr


def test_a_run_that_has_its_target_ends_there_until_it_is_given_another(run: Path, whole: dict[str, Any]) -> None:
    out = run.parent / "out"
    summary = execute(load_run(run, ["target_groups=1", "over_sample=4"]), Ear())
    told: list[str] = []
    assert resume(out, [], Ear(), say=told.append) == summary
    assert "target_groups=null goes on" in told[-1]
    results = (out / "summary.json").read_bytes()
    assert resume(out, ["target_groups=null"], Ear())["trajectories"] == 8
    (out / "summary.json").write_bytes(results)  # as if it had been killed before it wrote what it came to
    assert resume(out, ["target_groups=null"], Ear())["trajectories"] == 8
    assert rows(out) == whole
    (out / "report.html").unlink()  # as if before its last page
    resume(out, ["target_groups=null"], Ear())
    assert (out / "report.html").exists()


def test_a_run_whose_prompts_ran_out_goes_on_with_more(run: Path, whole: dict[str, Any]) -> None:
    out, prompts = run.parent / "out", run.parent / "prompts.jsonl"
    lines = prompts.read_text("utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:2]), "utf-8")
    assert execute(load_run(run, ["target_groups=4"]), Ear())["delivered_groups"] == 2
    prompts.write_text("".join(lines), "utf-8")
    assert resume(out, [], Ear())["delivered_groups"] == 4
    assert rows(out) == whole
    # So does one that was to end when its score is known, and had not enough prompts for that.
    prompts.write_text("".join(lines[:2]), "utf-8")
    assert execute(load_run(run, ["until=0.01"]), Ear(), replace=True)["trajectories"] == 4
    prompts.write_text("".join(lines), "utf-8")
    assert resume(out, [], Ear())["trajectories"] == 8


def test_a_run_that_ends_when_its_score_is_known_does_so_at_a_look_also_where_it_was_interrupted(run: Path) -> None:
    """All are right, so 20 of 70 prompts would do for ± 0.2, but which 20 are done first is no chance of the seed."""
    out, prompts = run.parent / "out", run.parent / "prompts.jsonl"
    given = [{"messages": [{"role": "user", "content": f"What is 1 + 2? ({i})"}], "answer": 3} for i in range(70)]
    lines = [json.dumps(prompt) + "\n" for prompt in given]
    prompts.write_text("".join(lines[:2]), "utf-8")
    options = ["until=0.2", "engine.turns=[The answer is 3.]"]
    assert execute(load_run(run, options), Ear(), replace=True)["trajectories"] == 4
    prompts.write_text("".join(lines), "utf-8")
    with interrupted(), pytest.raises(KeyboardInterrupt):
        resume(out, [], Ear(Ended, 40))
    summary = resume(out, [], Ear())
    assert summary["trajectories"] == 64
    told: list[str] = []
    assert resume(out, [], Ear(), say=told.append) == summary
    assert "nothing is left to do" in told[-1]


def test_a_damaged_event_costs_a_resumed_run_nothing_that_cannot_be_made_again(
    run: Path, whole: dict[str, Any]
) -> None:
    execute(load_run(run), Ear())
    out = run.parent / "out"
    (out / "summary.json").unlink()
    with closing(sqlite3.connect(out / "journal.sqlite")) as connection, connection:
        connection.execute(
            "UPDATE events SET payload = x'00' WHERE id = "
            "(SELECT id FROM events WHERE trajectory_id = '1/0' AND seq > 0 ORDER BY seq LIMIT 1)"
        )
        connection.execute("UPDATE events SET payload = x'00' WHERE trajectory_id = '2/1' AND seq = 0")
    shown = CliRunner().invoke(app, ["show", str(out)])
    assert (shown.exit_code, " of trajectory 1/0 is damaged" in shown.output.replace("\n", " ")) == (0, True)
    assert resume(out, [], Ear())["stop_reasons"] == {"answered": 8}
    assert rows(out) == whole
    assert (out / "journal.damaged.sqlite").exists()


def test_a_flipped_byte_in_a_limit_is_not_believed(run: Path) -> None:
    execute(load_run(run), Ear())
    out = run.parent / "out"
    path = out / "journal.sqlite"
    data = path.read_bytes()
    before, after = rb"\"concurrency\": 3", rb"\"concurrency\": 2"
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    done = CliRunner().invoke(app, ["resume", str(out)])
    assert done.exit_code == 2
    assert "does not say how its run was configured" in done.stderr
    shown = CliRunner().invoke(app, ["show", str(out)])
    assert "of its run's 'run' is left out: it is not what was written" in shown.output.replace("\n", " ")


def test_a_flipped_byte_in_the_log_of_a_killed_run_is_said_and_costs_nothing_that_cannot_be_made_again(
    run: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    out, left = run.parent / "out", run.parent / "left"
    left.mkdir()

    class Killed(Ear):
        def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
            super().hear(trajectory, event)
            if sum(isinstance(e, Ended) for e in self.heard) == 6:
                for file in out.glob("journal.sqlite*"):
                    (left / file.name).write_bytes(file.read_bytes())

    execute(load_run(run), Killed())
    log = left / "journal.sqlite-wal"
    intact = log.read_bytes()
    log.write_bytes(intact[:200] + bytes([intact[200] ^ 1]) + intact[201:])  # in the first page that it holds
    summary = resume(left, [], Ear(), file=run)
    assert summary["stop_reasons"] == {"answered": 8}
    assert rows(left) == whole
    assert "pages in its log are not what was written" in caplog.text
    assert (left / "journal.damaged.sqlite-wal").exists()


def test_a_run_of_an_earlier_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    before = gzip.decompress((ROOT / "tests/unit/trajectory/journal_format_3.sqlite.gz").read_bytes())
    journal.write_bytes(before)
    for command in (["resume"], ["show"], ["export"], ["rescore", "--reward", "fsm_rollout.rewards:first_answer"]):
        done = CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:]])
        assert done.exit_code == 2, command
        assert "has journal format 3 and this version reads 4; use the version of fsm-rollout" in done.stderr
    assert journal.read_bytes() == before


@pytest.mark.parametrize("kilobytes", [1, 20, 64])
def test_a_full_disk_says_so_and_leaves_what_goes_on(run: Path, whole: dict[str, Any], kilobytes: int) -> None:
    """A limit on the size of files stands for the disk: writes beyond it fail."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({kilobytes * 1024},) * 2)"
    done = program(f"{limited}\nfrom fsm_rollout.cli import main; main()", "run", run)
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    out = run.parent / "out"
    if (out / "journal.sqlite").exists():
        resume(out, [], Ear())
    else:
        execute(load_run(run), Ear())
    assert rows(out) == whole


def test_a_process_that_a_tool_ends_loses_no_turn(run: Path) -> None:
    """`os._exit` in the first call: the run goes on from there, with all that was sampled before."""
    tool, out, text = run.parent / "deadly.py", run.parent / "out", FILES["a calculator that ends its process"]
    tool.write_text(text)
    deadly = "agent.tools.calculate.use=deadly:calculate"
    assert fsm_rollout("run", run, deadly).returncode == 7
    tool.write_text(text.replace("os._exit(7)", "return '3'"))
    done = fsm_rollout("resume", out, deadly)
    assert done.returncode == 0, done.stderr
    assert rows(out)["stop_reason"] == ["answered"] * 8
    generated = [sum(isinstance(e, Generated) for e in events) for events in histories(out / "journal.sqlite")]
    assert generated == [3] * 8, "no turn is sampled twice"
