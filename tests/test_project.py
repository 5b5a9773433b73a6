"""What the files around the code say of one another is true: the workflows, the hooks, the targets of make."""

import re
import subprocess
import tomllib

import yaml

from tests.kit import ROOT

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_hosted_ci_does_what_ci_run_does_on_the_python_that_is_named_as_tested() -> None:
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    classifiers = tomllib.loads(read("pyproject.toml"))["project"]["classifiers"]
    tested = job["container"].removeprefix("python:").partition("-")[0]
    assert re.findall(r"Python :: (\d\.\d+)", "\n".join(classifiers)) == [tested]
    assert re.findall(r"^make (\S+)$", read(".ci/run"), re.MULTILINE) == ["test", "test-real", "test-trainers", "check"]


def test_hooks_run_the_programs_of_make_check() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repository["hooks"]}
    check = MAKEFILE.partition("\ncheck:")[2].partition("\n\n")[0]
    assert programs == set(re.findall(r"\$\(BIN\)/(\w+)", check))


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = MAKEFILE.partition(".PHONY:")[2].partition("\n")[0].split()
    assert [line.split()[0] for line in listed.splitlines()] == targets


def test_make_test_and_make_test_real_are_all_tests_between_them() -> None:
    assert re.findall(r"^\t\$\(PYTEST\) -m (.+)$", MAKEFILE, re.MULTILINE) == ['"not real"', "real"]


def test_each_fault_with_pictures_that_others_had_has_tests_here() -> None:
    threads = yaml.safe_load(read("tests/cases/media_threads.yaml"))
    named = [test for fault in threads for test in fault["tests"]]
    gone = [test for test in named if f"def {test.split('::')[1]}(" not in read(test.split("::")[0])]
    assert not gone
    assert all(fault["tests"] for fault in threads)
    assert len({thread for fault in threads for thread in fault["threads"]}) == 23
