"""A run's folder: who may write into it, and what it keeps of an earlier run.

Invariant: one process at a time writes into a run's folder, from before its engines are built until its results are in
place; and what an earlier run has left there is deleted only when the user asks for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.journal import JOURNAL, JournalFolder, is_journal, trajectory_ids

SUMMARY = "summary.json"
LOCK = "run.lock"  # there while a process writes into the folder; it names that process
# What a run writes into its folder, hence what the next run of that name replaces.
OWN_FILES = (
    *(f"{name}{end}" for name in (JOURNAL, "journal.damaged.sqlite") for end in ("", "-wal", "-shm")),
    "batch",
    "scores",
    SUMMARY,
    "report.html",
    "trajectories",
)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and keep other processes from running there meanwhile.

    A folder that is still empty at the end is removed again.

    Raises:
        ConfigError: another process runs there, or the folder cannot be made or written to.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]  # False for a name that is too long
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(folder)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out: '{folder}' cannot be the run's folder: {why}; choose another") from error
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # the first that is not empty
            for path in made:
                path.rmdir()


def _locked(folder: Path) -> int:
    """Return a folder's open lock file; this process's end frees it, however it ends, and no forked child holds it."""
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, folder / LOCK):  # else the process that had it has just removed it
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
            os.close(descriptor)
        except (BlockingIOError, PermissionError) as error:
            who = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"out: '{folder}' holds a run that is still going on ({who}); wait for it, stop it, or choose another "
                "folder"
            ) from error
        except OSError:
            os.close(descriptor)
            raise


def is_written(folder: Path) -> bool:
    """Whether a process is writing into a run's folder; one on another machine is believed to go on."""
    try:
        _, process, _, host = (folder / LOCK).read_text("utf-8").split()
        if host == socket.gethostname():
            os.kill(int(process), 0)
    except PermissionError:  # somebody else's process
        return True
    except (OSError, ValueError):
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def check_free(folder: Path, *, replace: bool) -> None:
    """Check that a new run may begin in a folder; ``replace``: also where an earlier run is.

    Raises:
        ConfigError: it holds files of a run's names that no run wrote, or (unless ``replace``) an earlier run.
    """
    existing = _own_files(folder)
    if existing and not is_journal(JournalFolder(folder).first):
        raise ConfigError(
            f"out: '{folder}' holds '{existing[0].name}', and no journal of a run that wrote it; choose another, or "
            f"remove it"
        )
    if not existing or replace or not (number := len(trajectory_ids(folder))):
        return
    if (folder / SUMMARY).exists():
        raise ConfigError(
            f"out: '{folder}' holds a finished run of {number:,} trajectories; choose another folder "
            f"(out={_next_free(folder)}), or give --replace to delete that run"
        )
    raise ConfigError(
        f"out: '{folder}' holds a run that has not come to its end; resume it (fsm-rollout resume {folder}), "
        f"choose another folder (out={_next_free(folder)}), or give --replace to delete it"
    )


def clear(folder: Path) -> None:
    """Delete what an earlier run has written into a folder; ConfigError if it cannot be deleted."""
    try:
        for file in _own_files(folder):
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out: what is in '{folder}' cannot be replaced: {why}; choose another folder") from error


def _own_files(folder: Path) -> list[Path]:
    shards = sorted(folder.glob(f"{Path(JOURNAL).stem}.shard-*"))
    return [*(folder / name for name in OWN_FILES if (folder / name).exists()), *shards]


def _next_free(folder: Path) -> Path:
    """Return the first of ``name-2``, ``name-3``, … that is not there, as the user would type it."""
    path = next(path for number in count(2) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
