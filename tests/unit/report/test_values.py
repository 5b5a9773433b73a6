"""The values of states and transitions over a run: a case that is worked out by hand."""

from pathlib import Path
from shutil import copytree

import pytest
from typer.testing import CliRunner

import fsm_rollout as fr
from fsm_rollout.cli import app
from fsm_rollout.diagrams.draw import to_dot, to_mermaid
from fsm_rollout.diagrams.palette import PALE
from fsm_rollout.diagrams.picture import picture
from fsm_rollout.errors import ConfigError
from fsm_rollout.report.recording import Recording
from fsm_rollout.report.values import RunValues, values_of_run
from fsm_rollout.trajectory.events import REWARD, Ended, Scored, Transitioned
from fsm_rollout.trajectory.journal import Journal
from tests.embedded import tokenizer
from tests.events import prompted
from tests.kit import CONFIGS

AGENT = CONFIGS / "agents/tool_user.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two prompts of two questions one is answered right once, one twice. A third has no score."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = [
        {"messages": [{"role": "user", "content": "Ask."}], "answer": first}
        | {"interaction_kwargs": {"turns": ["Again."], "answers": ["5"]}}
        for first in ("4", "5", "none")
    ]

    def reward(trajectory: fr.Trajectory) -> float | None:
        return None if trajectory.extra["answer"] == "none" else float(trajectory.extra["answer"] == "5")

    engine = fr.ScriptedEngine(["The answer is 5.", "The answer is 5."], tokenizer=tokenizer())
    with (
        Journal(folder / "journal.sqlite") as journal,
        fr.Rollout(fr.load_agent(AGENT), engine, reward=reward, journal=journal) as rollout,
    ):
        rollout.run(prompts)
    return folder


def test_a_value_is_what_followed(run: Path) -> None:
    """Returns of the first prompt are 1, 1 and of the second 3, 2: one for each right answer and for the whole."""
    values = values_of_run(graph := fr.load_agent(AGENT), run)
    assert "of 2 scored trajectories of 2 prompts" in values.about
    drawn = picture(graph, values=values)
    assert {box.name: box.value for box in drawn.boxes} == {
        "PENDING": "value 2.00 ± 1.00",
        "GENERATING": "value 1.75 ± 0.75",
        "INTERACTING": "value 1.75 ± 0.75",
        "PROCESSING_TOOLS": "",
        "TERMINATED": "",
    }
    arrows = {(a.source, label.trigger, a.dest): (label, a) for a in drawn.arrows for label in a.labels}
    said = {way: (label.value, label.share) for way, (label, _) in arrows.items()}
    assert said == {
        ("PENDING", "prompted", "GENERATING"): ("100 %: 2.00 ± 1.00", 1.0),
        ("GENERATING", "generated", "PROCESSING_TOOLS"): ("never", 0.0),
        ("GENERATING", "generated", "INTERACTING"): ("100 %: 1.75 ± 0.75", 1.0),
        ("PROCESSING_TOOLS", "tools_done", "GENERATING"): ("never", 0.0),
        ("INTERACTING", "replied", "GENERATING"): ("50 %: 2.00 ± 1.00", 0.5),
        ("INTERACTING", "interaction_done", "TERMINATED"): ("50 %: 1.50 ± 0.50", 0.5),
    }
    assert [way[1:] for way, (_, arrow) in arrows.items() if arrow.colour is PALE] == [
        ("generated", "PROCESSING_TOOLS"),
        ("tools_done", "GENERATING"),
    ]


def test_of_two_scores_of_a_trajectory_the_last_one_counts() -> None:
    own, rewarded = (Scored(at=1.0, value=1.0, source=source) for source in ("PENDING", REWARD))
    left = Transitioned(
        at=1.0, trigger="returned", source="PENDING", dest="END", spent={}, stop_reason="answered", detail=None
    )
    events = [prompted(), own, left, Ended(at=1.0, stop_reason="answered"), rewarded]
    assert RunValues("a", "run", [Recording.of(events)]).of_state("PENDING") == "value 1.00"


def test_an_attempt_in_whose_place_another_began_counts_nowhere(run: Path, tmp_path: Path) -> None:
    folder = copytree(run, tmp_path / "again")
    begun = prompted("1/0~1", agent="tool_user")
    left = Transitioned(
        at=1.0, trigger="prompted", source="PENDING", dest="END", spent={}, stop_reason="answered", detail=None
    )
    with Journal(folder / "journal.sqlite", append=True) as journal:
        for event in (begun, left, Ended(at=1.0, stop_reason="answered"), Scored(at=1.0, value=0.5, source=REWARD)):
            journal.append(begun.trajectory_id, event)
    values = values_of_run(fr.load_agent(AGENT), folder)
    assert "of 2 scored trajectories of 2 prompts" in values.about
    assert values.of_state("PENDING") == "value 0.75 ± 0.25"


def test_the_command_draws_them(run: Path, tmp_path: Path) -> None:
    graph = fr.load_agent(AGENT)
    for name, form in (("a.dot", to_dot), ("a.mmd", to_mermaid)):
        done = CliRunner().invoke(app, ["draw", str(AGENT), "--run", str(run), "-o", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        text = (tmp_path / name).read_text("utf-8")
        assert text == form(graph, values=values_of_run(graph, run)) != form(graph)
        assert "1.75" in text
    done = CliRunner().invoke(app, ["draw", str(AGENT), "--run", str(run), "-o", "-"])
    assert done.output.strip() == text.strip()


def test_a_run_of_other_agents_has_no_values_for_this_one(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a run of tool_user, not of tool_agent"):
        values_of_run(fr.load_agent(CONFIGS / "agents/tool_agent.yaml"), run)
