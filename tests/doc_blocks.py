"""Executes the fenced blocks of a page of documentation, in their order, in a folder of the page's own.

Invariant: no block is passed over. What a block's language says is done with it:

- ``python``: runs; the blocks of a page share their names. With ``title="file.py"`` it is written to that file, and
  imported where it is a module that other blocks name.
- ``yaml``: with a title it is written to that file, and an agent or a run is checked as ``fsm-rollout`` checks it.
  Without one it is a part of an agent or of a run, which is laid over a small one of its kind and read.
- ``json``, ``jsonl``, ``markdown`` and others with a title are written to that file; JSON is read.
- ``console``: lines after ``$ `` are commands. Those of ``fsm-rollout``, ``python`` and ``pytest`` run in the page's
  folder (``fsm-rollout`` within this process), and what they print is compared with the lines that follow, where ``…``
  stands for anything. Of ``pip install`` and ``make`` the names are checked.
- ``text``: a picture, an output at other times, or code of another library; it is not executed.

A comment ``<!-- needs: ray -->`` before a block says what it needs; such blocks run only where that is wanted.
"""

import contextlib
import glob
import importlib
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import read_agent
from fsm_rollout.engines.specs import faults
from fsm_rollout.jobs.run_config import RunConfig, load_run
from fsm_rollout.names.objects import _folders
from tests.kit import ROOT
from tests.programs import program as in_a_process

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs: ([\w ]+) -->\s*$")
TITLE = re.compile(r'title="([^"]+)"')
NEEDED = ("ray", "sglang", "gpu", "process", "trl", "verl")
"""What a block may need that the fast tests do not have. What needs a GPU is checked in form, and runs nowhere."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block, and where it stands."""

    page: str
    line: int
    language: str
    title: str | None
    text: str
    needs: frozenset[str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page that is tested, relative to the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text = (ROOT / page).read_text("utf-8")
    found: list[Block] = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = TITLE.search(rest)
        needs = NEEDS.search(text[: match.start()])
        indent = match["indent"]
        lines = (line.removeprefix(indent) for line in match["body"].split("\n"))
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                language,
                title[1] if title else None,
                "\n".join(lines),
                frozenset(needs[1].split()) if needs else frozenset(),
            )
        )
    return found


@dataclass
class PageRun:
    """One page under way: its folder, and the names that its Python blocks have made."""

    folder: Path
    allowed: frozenset[str] = frozenset()
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})

    def run(self, block: Block) -> None:
        """Do with a block what its language says; an AssertionError or the block's own error tells what is wrong."""
        assert block.needs <= set(NEEDED), f"{block.place}: needs {set(block.needs)}; known: {NEEDED}"
        runs = block.needs <= self.allowed
        match block.language:
            case "python" if block.title is None:
                code = compile(block.text, block.place, "exec")
                if runs:
                    exec(code, self.names)
            case "console":
                self._console(block, runs=runs)
            case "yaml" if block.title is None:
                _check_part(block)
            case "text":
                assert block.title is None, f"{block.place}: a text is not a file"
            case language:
                assert block.title is not None, f"{block.place}: a block in {language!r} that is no file needs a title"
                self._write(block)

    def _write(self, block: Block) -> None:
        path = self.folder / str(block.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, "utf-8")
        importlib.invalidate_caches()
        match block.language:
            case "python":
                compile(block.text, block.place, "exec")
            case "json":
                json.loads(block.text)
            case "jsonl":
                assert all(isinstance(json.loads(line), dict) for line in block.text.split("\n") if line), block.place
            case "yaml":
                data = yaml.safe_load(block.text)
                if isinstance(data, dict) and "states" in data:
                    problems = read_agent(path).problems
                    assert not problems, f"{block.place}: {[str(problem) for problem in problems]}"
                elif isinstance(data, dict) and "prompts" in data:
                    config = load_run(path)
                    for spec in (config.engine, *config.engines.values()):
                        assert not faults(spec), f"{block.place}: {faults(spec)}"

    def _console(self, block: Block, *, runs: bool) -> None:
        for command, expected in commands(block.text):
            program, *words = shlex.split(command, comments=True)
            arguments = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
            match program, arguments:
                case "make", _:
                    makefile = (ROOT / "Makefile").read_text("utf-8")
                    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in arguments if "=" not in name)
                case ("pip", ["install", *names]) | ("uv", ["pip", "install", *names]):
                    _check_install(names, block.place)
                case "fsm-rollout" | "python" | "pytest", _ if runs:
                    printed = self._execute(program, arguments)
                    assert not expected or like(expected, printed), (
                        f"{block.place}: $ {command}\nprinted:\n{printed}\nbut the page says:\n{expected}"
                    )
                case "fsm-rollout", ["run" | "serve", file, *overrides]:
                    self._check_run(self.folder / file, overrides)
                case "fsm-rollout" | "python" | "pytest", _:
                    pass
                case "cd" | "ls" | "ray" | "curl" | "nvidia-smi" | "git" | "source" | "export", _:
                    pass
                case _:
                    raise AssertionError(f"{block.place}: nobody knows what `{command}` is to do here")

    def _check_run(self, path: Path, overrides: list[str]) -> None:
        if path.exists():
            config = load_run(path, overrides)
            assert not faults(config.engine), faults(config.engine)

    def _execute(self, program: str, arguments: list[str]) -> str:
        if program == "fsm-rollout":
            return fsm_rollout(arguments)
        if program == "pytest":
            code, arguments = "import pytest, sys; pytest.main(sys.argv[1:])", ["-p", "no:cacheprovider", *arguments]
        else:
            code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
        found = in_a_process(code, *arguments, cwd=self.folder)
        return found.stdout + found.stderr


@contextlib.contextmanager
def page_folder(folder: Path) -> Iterator[Path]:
    """Work in a page's folder, with the repository's examples at hand; what is imported from it is forgotten after."""
    for name in ("configs", "diagrams"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    before, searched, known = set(sys.modules), list(sys.path), list(_folders)
    sys.path.insert(0, str(folder))
    with contextlib.chdir(folder):
        try:
            yield folder
        finally:
            sys.path[:], _folders[:] = searched, known
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]


def run_page(page: str, folder: Path, allowed: frozenset[str] = frozenset()) -> None:
    """Run every block of a page, those that need something only as far as it is allowed."""
    with page_folder(folder):
        under_way = PageRun(folder, allowed)
        for block in blocks(page):
            try:
                under_way.run(block)
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, with what is said to be printed."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = re.sub(r"\\\n *", "", part).partition("\n")
        yield command, expected.strip("\n")


def like(expected: str, printed: str) -> bool:
    """Whether what was printed has the lines expected, one after the other; ``…`` stands for anything."""
    squeezed = " ".join(printed.split())
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in expected.split("…"))
    return re.search(pattern, squeezed) is not None


def fsm_rollout(arguments: list[str]) -> str:
    """Run a command of the command line within this process and return all that it printed."""
    from fsm_rollout import cli

    printed = io.StringIO()
    before = sys.argv
    sys.argv = ["fsm-rollout", *arguments]
    try:
        output = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
        with output[0], output[1], contextlib.suppress(SystemExit):
            cli.main()
    finally:
        sys.argv = before
    return printed.getvalue()


def _check_install(names: list[str], place: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name in names:
        if match := re.match(r"(?:fsm-rollout|\.)\[([\w,-]+)\]", name):
            assert set(match[1].split(",")) <= set(extras), f"{place}: {name}; extras are {sorted(extras)}"


def _check_part(block: Block) -> None:
    """Lay a part of a YAML over a small agent or run, and read it."""
    part = yaml.safe_load(block.text)
    assert isinstance(part, dict), f"{block.place}: a part of a YAML is a mapping"
    for model, base in ((AgentGraph, _small_agent()), (RunConfig, _small_run())):
        known = {info.alias or name for name, info in model.model_fields.items()}
        if set(part) <= known:
            _read_part(block, model, _over(part, base))
            return
    raise AssertionError(f"{block.place}: keys {sorted(part)} are neither those of an agent nor of a run")


def _read_part(block: Block, model: type, whole: Mapping[str, Any]) -> None:
    path = Path("part.yaml")
    path.write_text(yaml.safe_dump(dict(whole), sort_keys=False), "utf-8")
    if model is AgentGraph:
        problems = [problem for problem in read_agent(path).problems if not problem.rule]
        assert not problems, f"{block.place}: {[str(problem) for problem in problems]}"
    else:
        config = load_run(path)
        for spec in (config.engine, *config.engines.values()):
            assert not faults(spec), f"{block.place}: {faults(spec)}"


def _small_agent() -> dict[str, Any]:
    agent: dict[str, Any] = yaml.safe_load((ROOT / "configs/agents/tool_agent.yaml").read_text("utf-8"))
    return agent | {"contexts": {"main": {}}}


def _small_run() -> dict[str, Any]:
    return {
        "agent": "configs/agents/tool_agent.yaml",
        "prompts": "prompts.jsonl",
        "engine": {"kind": "scripted", "turns": ["Done."]},
        "out": "runs/small",
    }


def _over(part: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a part over a whole: mappings key by key, the engine (another kind has other keys) and lists as they are."""
    merged = dict(base)
    for key, value in part.items():
        below = base.get(key)
        deeper = isinstance(value, Mapping) and isinstance(below, Mapping) and not key.startswith("engine")
        merged[key] = _over(value, below) if deeper and isinstance(below, Mapping) else value
    return merged
