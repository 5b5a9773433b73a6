"""What users, strangers and disks may give: each of it is taken, or refused in words, and never ends in a traceback.

    python -m tests.fuzz --count 100000 --seed 1

Agents' YAMLs, runs' YAMLs, prompts and journals are taken from the repository (and from a run of its own) and mutated:
characters, lines, values, structures, bytes of the file. Each example follows from the seed and its number alone, so
``--only N`` shows one again.
"""

import argparse
import contextlib
import io
import json
import logging
import sqlite3
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import yaml
from rich.console import Console

from fsm_rollout.agent.loader import read_agent
from fsm_rollout.agent.proof import prove
from fsm_rollout.errors import RolloutError
from fsm_rollout.jobs.export import export
from fsm_rollout.jobs.recorded_config import recorded_config
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.report.recording import open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.trajectory.journal import Journal, metadata, read
from fsm_rollout.trajectory.journal.schema import checksum
from fsm_rollout.trajectory.prompt import read_prompts
from tests.kit import CONFIGS
from tests.unit.report.recorded_runs import history, write_run

NASTY: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**31, 2**63, 2**200, 1e308, float("inf"), float("nan"), -0.5, "", " ", "x", "[/x]", "[red]x",
    "\x1b[31m", "\x00", "\ud800", "${", "${x}", "${oc.env:HOME}", "${" * 60, "a" * 5000, "../x", "/proc/self/mem",
    "no.such:thing", "os:getcwd", "GENERATING", "TERMINATED", "yes", "07", "<script>", "\u202e", [], {}, [[]],
    [None], {"x": 1}, {"": ""}, [1] * 300, {"text": 7}, {"use": 7}, "*", "&a *a", "!!python/object:os.system", "1e400",
    "-", ":", "{", "}",
)  # fmt: skip


# -- mutations ------------------------------------------------------------------------------------------------------


def text_mutated(text: str, random: Random) -> str:
    """Return a text with some characters or lines changed."""
    for _ in range(random.choice((1, 1, 2, 5))):
        lines = text.split("\n")
        at, other = random.randrange(len(lines)), random.randrange(len(lines))
        place = random.randrange(len(text) + 1)
        match random.randrange(8):
            case 0:
                del lines[at]
                text = "\n".join(lines)
            case 1:
                lines.insert(other, lines[at])
                text = "\n".join(lines)
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
                text = "\n".join(lines)
            case 3:
                text = text[:place]
            case 4:
                text = text[:place] + random.choice("{}[]:,#&*!|>'\"%@`\t\n -~?\\\x00\x85\ufeff\xe90") + text[place:]
            case 5:
                text = text[:place] + text[place + random.randrange(1, 9) :]
            case 6:
                lines[at] = " " * random.randrange(9) + lines[at].strip()
                text = "\n".join(lines)
            case _:
                text = text[:place] + str(random.choice(NASTY)) + text[place:]
        if not text:
            return text
    return text


def data_mutated(data: Any, random: Random) -> Any:
    """Return plain data with some values, keys or branches exchanged."""
    data = json.loads(json.dumps(data, default=str))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(data))
        if not places:
            return random.choice(NASTY)
        holder, key = random.choice(places)
        match random.randrange(5):
            case 0:
                del holder[key]
            case 1:
                holder[key] = deepcopy(random.choice(NASTY))
            case 2:
                holder[key] = deepcopy(random.choice([h[k] for h, k in places]))
            case 3 if isinstance(holder, dict):
                holder[str(random.choice(NASTY))] = holder[key]
            case _:
                holder[key] = [holder[key]] * random.randrange(4)
        data = json.loads(json.dumps(data, default=str))
    return data


def _places(data: Any) -> Any:
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


# -- inputs ---------------------------------------------------------------------------------------------------------


def _mutated(text: str, random: Random) -> str:
    if random.random() < 0.5:
        return text_mutated(text, random)
    return yaml.safe_dump(data_mutated(yaml.safe_load(text), random), allow_unicode=True)


def agent(folder: Path, random: Random) -> None:
    """An agent is read, verified and proven, or its problems are listed."""
    source = random.choice(sorted((CONFIGS / "agents").glob("*.yaml")))
    path = folder / "agent.yaml"
    path.write_text(_mutated(source.read_text("utf-8"), random), "utf-8", errors="surrogatepass")
    reading = read_agent(path)
    for problem in reading.problems:
        str(problem)
    if reading.graph is not None and not reading.problems:
        prove(reading.graph)


def run(folder: Path, random: Random) -> None:
    """A run's YAML is read, with overrides."""
    source = random.choice(sorted((CONFIGS / "runs").glob("*.yaml")))
    path = folder / "run.yaml"
    path.write_text(_mutated(source.read_text("utf-8"), random), "utf-8", errors="surrogatepass")
    override = random.choice(
        ("", "n=2", "engine.x=1", "sampling=7", "=", "agent.limits.x=1", text_mutated("n=2", random))
    )
    load_run(path, [override] if override else [])


def prompts(folder: Path, random: Random) -> None:
    """Prompts are read."""
    source = random.choice(sorted((CONFIGS / "data").glob("*.jsonl")))
    lines = source.read_text("utf-8").split("\n")[:3]
    if random.random() < 0.5:
        lines = text_mutated("\n".join(lines), random).split("\n")
    else:
        lines = [json.dumps(data_mutated(json.loads(line), random)) for line in lines if line]
    path = folder / random.choice(("p.jsonl", "p.jsonl", "p.json", "p.parquet"))
    path.write_text("\n".join(lines), "utf-8", errors="surrogatepass")
    read_prompts(path)


@cache
def recorded_run() -> bytes:
    """Return the journal of a run."""
    with TemporaryDirectory() as folder:
        write_run(Path(folder), {f"{n}/0": history(f"{n}/0", group_id=str(n)) for n in range(3)})
        return (Path(folder) / "journal.sqlite").read_bytes()


def journal(folder: Path, random: Random) -> None:
    """A journal is looked at, exported and gone on with, as far as it can be read."""
    path, data = folder / "journal.sqlite", recorded_run()
    match random.randrange(4):
        case 0:  # bytes
            data = bytearray(data)
            for _ in range(random.choice((1, 3, 30, 300))):
                data[random.randrange(len(data))] = random.randrange(256)
            path.write_bytes(data)
        case 1:
            path.write_bytes(data[: random.randrange(len(data))])
        case 2:  # what the run says of itself
            path.write_bytes(data)
            with closing(sqlite3.connect(path)) as connection, connection:
                for key, value in connection.execute("SELECT key, value FROM run").fetchall():
                    changed = json.dumps(data_mutated({"value": json.loads(value)}, random))
                    changed = json.dumps(json.loads(changed).get("value") if changed.startswith("{") else None)
                    if random.random() < 0.5:
                        changed = text_mutated(value, random)
                    row = (_storable(changed), checksum(key, _storable(changed)), key)
                    connection.execute("UPDATE run SET value = ?, crc = ? WHERE key = ?", row)
        case _:  # events, whose sums are right
            path.write_bytes(data)
            with closing(sqlite3.connect(path)) as connection, connection:
                rows = connection.execute("SELECT id, trajectory_id, seq, ended, payload FROM events").fetchall()
                for id_, *columns, payload in random.sample(rows, 2):
                    events = msgspec.msgpack.decode(payload)
                    with contextlib.suppress(TypeError, ValueError, OverflowError):
                        event = random.choice(events)
                        key = random.choice(list(event))
                        event[key] = random.choice((*NASTY, *event.values()))
                        payload = msgspec.msgpack.encode(events)
                        update = "UPDATE events SET payload = ?, crc = ? WHERE id = ?"
                        connection.execute(update, (payload, checksum(*columns, payload), id_))
    console = Console(file=io.StringIO(), width=random.choice((40, 100, 200)))
    for look in random.sample(LOOKS, 2):
        with contextlib.suppress(RolloutError):
            look(folder, console)


def _storable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode()


def _page(folder: Path, console: Console) -> None:
    write_report(folder, folder / "report.html", pages=True)


def _view(folder: Path, console: Console) -> None:
    console.print(show(folder))
    for trajectory_id in ("0/0", "2/0"):
        with contextlib.suppress(RolloutError):
            console.print(show(folder, trajectory_id))


def _timeline(folder: Path, console: Console) -> None:
    show(folder, None, folder / "t.trace.json")


def _rows(folder: Path, console: Console) -> None:
    export(folder, "jsonl", folder / "rows.jsonl", report=lambda sentence: None)


def _go_on(folder: Path, console: Console) -> None:
    open_run(folder)
    list(read(folder / "journal.sqlite"))
    with contextlib.suppress(RolloutError):
        recorded_config(folder, metadata(folder / "journal.sqlite"), ())
    Journal(folder / "journal.sqlite", append=True).close()


LOOKS: tuple[Callable[[Path, Console], None], ...] = (_page, _view, _timeline, _rows, _go_on)
KINDS: tuple[Callable[[Path, Random], None], ...] = (agent, run, prompts, journal)


def example(seed: int, number: int) -> str | None:
    """Try one mutated input; return a traceback if it is neither taken nor refused."""
    random = Random(f"{seed} {number}")
    kind = random.choice(KINDS)
    with TemporaryDirectory() as folder:
        try:
            kind(Path(folder), random)
        except RolloutError as error:
            return None if str(error) else f"{number}: {kind.__name__}: refused without a word"
        except Exception:  # what this program is looking for
            return f"{number}: {kind.__name__}: {traceback.format_exc()}"
    return None


def main() -> int:
    """Try many; print what fails and how many did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one example, by its number")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    failures = 0
    for number in numbers:
        found = example(arguments.seed, number)
        if found is not None:
            failures += 1
            print(found, flush=True)
        if number % 1000 == 999:
            print(f"{number + 1:,} inputs, {failures} of them neither taken nor refused", file=sys.stderr, flush=True)
    print(f"{len(numbers):,} inputs, {failures} of them neither taken nor refused")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
