"""What a rollout takes, in which forms, and what it says of all else: one line, and the caller's."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fsm_rollout as fr
from fsm_rollout.agent.loader import dump
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.model.folders import model_folder
from fsm_rollout.rollout import BATCH_OPTIONS
from tests.cases import table
from tests.kit import CONFIGS
from tests.rollouts import SCRIPTED, Made, agent


def test_an_unsound_agent_and_a_wrong_engine_are_refused() -> None:
    loop = agent().model_copy(update={"limits": agent().limits.model_copy(update={"wall_seconds": None})})
    rows = (*loop.transitions[:1], loop.transitions[1].model_copy(update={"dest": "GENERATING"}))
    with pytest.raises(fr.ConfigError, match="rule"):
        fr.Rollout(loop.model_copy(update={"transitions": rows}), SCRIPTED)
    with pytest.raises(fr.ConfigError, match="engine 'policy'"):
        fr.Rollout(agent(), {"kind": "scriptd"})


AGENT_FILE = CONFIGS / "agents/single_turn.yaml"


@pytest.mark.parametrize("form", [str(AGENT_FILE), AGENT_FILE, "mapping", {"solver": AGENT_FILE}])
def test_an_agent_may_be_given_in_any_clear_form(form: Any) -> None:
    given = yaml.safe_load(dump(agent())) if form == "mapping" else form
    with fr.Rollout(given, SCRIPTED) as rollout:
        assert list(rollout.agents.values()) == [agent()]
        assert list(rollout.agents) == (["solver"] if isinstance(form, dict) else [agent().agent])


def test_an_engine_may_be_given_as_a_model(tmp_path: Path) -> None:
    folder = model_folder("embedded:early")
    (tmp_path / "mine").symlink_to(folder)
    for given, base in (("embedded", None), ("embedded:early", None), (folder, None), ("mine", tmp_path)):
        with fr.Rollout(agent(), given, base=base) as rollout:
            assert type(rollout.engines["policy"].replicas[0].engine).__name__ == "TransformersEngine"
            assert rollout.description["engines"]["policy"]["kind"] == "transformers"


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("embeded", "engine 'policy': model 'embeded': there is no folder"),
        ("sglang", '\'sglang\' is a kind of engine; give it with its keys: {"kind": "sglang", …}'),
        (ScriptedEngine, 'fsm_rollout.engines.scripted.engine:ScriptedEngine", …}'),
        (["scripted"], "got a list, which is no engine (it lacks tokenizer, "),
        (None, "got a NoneType, which is no engine"),
        ({"kind": "scripted", "trns": []}, "engine 'policy': unknown key 'trns'; did you mean 'turns'?"),
    ],
)
def test_what_is_no_engine_says_what_to_give(engine: Any, says: str) -> None:
    with pytest.raises(fr.ConfigError) as caught:
        fr.Rollout(agent(), engine)
    assert str(caught.value).startswith("engine 'policy': ")
    assert says in str(caught.value)
    with pytest.raises(fr.ConfigError, match="engine 'judge': "):
        fr.Rollout(agent(), SCRIPTED, engines={"judge": engine})


@pytest.mark.parametrize("case", table("rollout_arguments")["rollout"], ids=str)
def test_a_wrong_argument_is_one_clear_line(case: dict[str, Any]) -> None:
    with pytest.raises(fr.ConfigError) as caught:
        fr.Rollout(**{"agent": agent(), "engine": SCRIPTED} | case["given"])
    assert case["says"] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert {entry.path for entry in caught.traceback} == {Path(__file__)}, "the caller's line, and none of ours"


def test_prompts_may_be_given_as_their_file(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "?"}], "prompt_id": "mine"}\n', "utf-8")
    with made(agent(), SCRIPTED) as rollout:
        assert rollout.run(file).tensordict["group_id"] == ["mine"]
        (again,) = rollout.run(str(file), target_groups=1).tensordict["group_id"]
        assert again.partition("#")[0] == "mine"  # where there is a journal, as services have, it is another
        with pytest.raises(fr.ConfigError, match=r"no such file; did you mean 'prompts.jsonl'\?"):
            rollout.run(tmp_path / "promts.jsonl")
        with pytest.raises(fr.ConfigError, match="prompts must come as a list, got one text"):
            rollout.run("What is 1 + 1?")


def test_an_argument_that_nothing_takes_is_refused_before_anything_is_sampled(made: Made) -> None:
    with made(agent(), SCRIPTED) as rollout:
        with pytest.raises(fr.ConfigError, match="run: unknown argument 'target_group'; did you mean 'target_groups'"):
            rollout.run(["hm"], target_group=1)
        with pytest.raises(fr.ConfigError, match="evaluate: unknown argument 'samplin'; did you mean 'sampling'"):
            rollout.evaluate(["hm"], samplin={})
        assert rollout.engine_stats()["policy"]["requests"] == 0
    takes = inspect.signature(fr.TrajectoryBatch.from_trajectories).parameters
    assert set(BATCH_OPTIONS) == set(takes) - {"trajectories", "processor"}, "the processor is the engine's"


def test_a_misspelt_argument_and_a_reward_that_is_not_there_are_one_line_each() -> None:
    with pytest.raises(fr.ConfigError, match=r"^Rollout: unknown argument 'rewards'; did you mean 'reward'\?$"):
        fr.Rollout(agent(), SCRIPTED, rewards="fsm_rollout.rewards:exact_answer")  # type: ignore[call-arg]
    with pytest.raises(fr.ConfigError, match=r"has no 'exact_anser'.*did you mean 'exact_answer'") as caught:
        fr.Rollout(agent(), SCRIPTED, reward="fsm_rollout.rewards:exact_anser")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_prompts_without_what_the_reward_reads_are_refused_before_anything_is_sampled(made: Made) -> None:
    with made(agent(), SCRIPTED, reward="fsm_rollout.rewards:exact_answer") as rollout:
        with pytest.raises(fr.ConfigError, match="prompt '0' has no 'answer', which reward 'exact_answer' reads"):
            rollout.run(["What is 2 + 2?"], n=4)
        assert rollout.engine_stats()["policy"]["requests"] == 0


@pytest.mark.parametrize("case", table("rollout_arguments")["run"], ids=str)
def test_a_wrong_number_is_one_clear_line(made: Made, case: dict[str, Any]) -> None:
    with made(agent(), SCRIPTED) as rollout, pytest.raises(fr.ConfigError, match=re.escape(case["says"])) as caught:
        rollout.run(["What is 2 + 2?"], **case["given"])
    assert {entry.path for entry in caught.traceback} == {Path(__file__)}
