"""The documentation tells the truth: every block of every page is executed, every link leads somewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doc_blocks import blocks, fsm_rollout, like, pages, run_page
from tests.kit import ROOT, script

WITH_BLOCKS = [page for page in pages() if blocks(page)]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_does_what_the_page_says(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", [*pages(), "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r'(?:\]\(|(?:src|srcset)=")(?!https?:)([^)"#]+)[)"#]', text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_a_wrong_line_of_output_is_noticed() -> None:
    assert like("a … c\nd", "x\na  b  c\nd\n")
    assert not like("a … c\nd", "a b c\ne\n")
    assert "--help" in fsm_rollout(["--help"])
    assert "Traceback" not in fsm_rollout(["check", "missing.yaml"])


def test_the_readme_s_agent_is_the_shipped_one_and_its_figures_are_the_measured_ones() -> None:
    (shown,) = (block for block in blocks("README.md") if block.title == "tool_user.yaml")
    agents = [
        yaml.safe_load(text) for text in (shown.text, (ROOT / "configs/agents/tool_user.yaml").read_text("utf-8"))
    ]
    agents[0]["contexts"]["main"]["system"] = agents[1]["contexts"]["main"]["system"]
    del agents[1]["description"]
    assert agents[0] == agents[1]
    card = json.loads((ROOT / "fsm_rollout/model/card.json").read_text("utf-8"))
    for name in ("final", "early"):
        figures = f"{100 * card[name]['success_t1']:.1f} % | {100 * card[name]['success_greedy']:.1f} %"
        assert figures in (ROOT / "README.md").read_text("utf-8")


def test_the_navigation_names_pages_that_there_are() -> None:
    named = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.MULTILINE)
    added = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert set(named) - added <= {page.removeprefix("docs/") for page in pages()}


# -- the reference --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Any:
    return script("docs/site/reference.py")


def test_every_table_is_shown_somewhere(reference: Any) -> None:
    shown = {name for page in pages() for name in re.findall(r"<!-- reference: (\w+) -->", (ROOT / page).read_text())}
    for name in shown:
        assert getattr(reference, name)() or name == "failure_classes", name


@pytest.mark.parametrize("page", [page for page in pages() if "<!-- reference: " in (ROOT / page).read_text("utf-8")])
def test_the_tables_in_the_repository_are_those_of_the_code(reference: Any, page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert text == reference.filled(text), f"{page} is not what the code says; run `make reference`"


def test_every_tensor_and_column_of_a_batch_has_a_meaning(reference: Any) -> None:
    meanings = reference.tensor_meanings()
    keys = list(reference.small_batch().tensordict.keys())
    assert [key for key in keys if not meanings.get(key)] == []
    assert "`[B, P+R]`" in reference.batch_tensors()


@pytest.mark.parametrize(
    "name",
    ["limits", "predicates", "triggers", "handlers", "stop_reasons", "finish_reasons", "errors", "template_facts"],
)
def test_every_row_of_a_table_says_what_it_means(reference: Any, name: str) -> None:
    lines = [line for line in getattr(reference, name)().split("\n") if line.startswith("|")]
    assert len(lines) > 4
    for line in lines[2:]:
        assert all(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]), line


def test_every_command_is_shown_as_its_help_shows_it(reference: Any) -> None:
    text = reference.commands()
    for name in ("check", "draw", "run", "resume", "show", "schema", "new"):
        assert f"## `fsm-rollout {name}`" in text
    assert "\\b" not in text  # click's mark for "do not wrap", which a raw docstring would show


def test_every_public_name_is_in_the_python_api(reference: Any) -> None:
    import fsm_rollout

    text = reference.python_api()
    assert [name for name in fsm_rollout.__all__ if f'heading: "fr.{name}"' not in text] == []
    assert "::: fsm_rollout.rollout.Rollout" in text
