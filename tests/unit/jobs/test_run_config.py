"""Run files: complete, strict, and every mistake named with its line."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import dump, loads
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.control import REPLICAS, orders_left, with_orders
from fsm_rollout.jobs.evaluate import evaluations
from fsm_rollout.jobs.recorded_config import recorded_config
from fsm_rollout.jobs.run_config import RunConfig, WeightedReward, load_run, recorded_run
from fsm_rollout.jobs.run_prompts import PromptSource
from fsm_rollout.jobs.runner import load_agents, prompts_of
from fsm_rollout.scheduler.failure_policy import EngineFailures, Failures, ToolFailures
from fsm_rollout.trajectory.settings import Sampling
from tests.cases import FILES, table
from tests.embedded import tokenizer
from tests.kit import ROOT

SMALLEST = "agent: a.yaml\nprompts: p.jsonl\nengine: {kind: scripted}\nout: runs/x\n"

EVERY_KEY = FILES["run with every key"]

RUNS = ROOT / "configs" / "runs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project and go there; run files have a place within it."""
    (tmp_path / "configs" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "configs/runs/run.yaml").write_text(text)
    return load_run("configs/runs/run.yaml", overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return [str(problem).removeprefix("configs/runs/run.yaml") for problem in caught.value.problems]


def resolved(path: Path) -> Path:
    return path.resolve()


def test_every_key(folder: Path) -> None:
    run = load(folder, EVERY_KEY)
    assert isinstance(run.agent, Path)
    assert run.agent.resolve() == folder / "configs/agents/tool_user.yaml"
    assert run.prompts.resolve() == folder / "configs/data/arithmetic.jsonl"
    assert run.out == folder / "runs/demo"
    assert run.base == folder / "configs/runs"
    assert run.chat_template == folder / "configs/runs/../templates/own.jinja"
    assert (run.n, run.limit, run.seed, run.validate_run) == (4, 64, 7, True)
    assert run.sampling == Sampling(temperature=0.5, top_k=3)
    assert run.validation_sampling == Sampling(temperature=0.25)
    assert run.reward == (WeightedReward(use="fsm_rollout.rewards:exact_answer"),)
    assert run.rewards == "fsm_rollout.rewards:exact_answer"
    assert run.engine == {"kind": "transformers", "model": "embedded", "nested": {"list": [1, "two"]}}
    assert run.engines == {"judge": {"kind": "scripted"}}
    assert (run.teachers["big"].engine, run.teachers["big"].top_k, run.teachers["other"].hint) == ("judge", 2, None)
    assert run.specs["teachers", "other", "engine"] == {"kind": "scripted"}
    assert run.failures == Failures(engine=EngineFailures(attempts=5), tool=ToolFailures(do="end"))
    assert (run.concurrency, run.queue_timeout, run.agent_overrides) == (8, 1.5, ())
    assert (run.group_filter, run.target_groups) == ("fsm_rollout.rewards:scores_differ", 3)
    assert (run.over_sample, run.tail, run.max_filtered) == (2.5, "sync+longest", 8)
    assert run.track is not None
    assert (run.track.use, run.track.model_extra) == ("wandb", {"project": "mine"})
    assert run.tracing is not None
    assert (run.tracing.destination().endpoint, run.tracing.share) == ("http://127.0.0.1:4318/v1/traces", 0.5)
    assert (run.serve.port, run.serve.host, run.serve.waiting) == (0, "127.0.0.1", 5)
    assert run.serve.api_keys == folder / "configs/runs/keys.txt"
    assert run.serve.out == folder / "runs/demo-serve"
    assert load(folder, EVERY_KEY, "serve.api_keys=keys.txt").serve.api_keys == folder / "keys.txt"
    for out, conversations in ((".", f"{folder}-serve"), ("..", f"{folder.parent}-serve"), ("/", "/-serve")):
        assert str(load(folder, EVERY_KEY.replace("runs/demo", out)).serve.out) == conversations
    (folder / "configs/runs/whole.yaml").write_text(EVERY_KEY, "utf-8")
    assert {config.out for config in evaluations(Path("configs/runs/whole.yaml"), [])} == {
        folder / "runs/demo-eval/cold"
    }
    cold = load_run("configs/runs/run.yaml", variant="cold")
    assert (cold.n, cold.sampling, cold.variants) == (2, Sampling(temperature=0.0, top_k=3), {})
    assert set(EVERY_KEY.replace(":", " ").split()) >= {f.alias or n for n, f in RunConfig.model_fields.items()}


def test_defaults(folder: Path) -> None:
    run = load(folder, SMALLEST)
    assert (run.n, run.limit, run.seed, run.validate_run, run.rewards) == (1, None, 0, False, None)
    assert (run.sampling, run.validation_sampling) == (Sampling(), Sampling(temperature=0.0))
    assert (run.engines, run.failures.engine.attempts, run.failures.tool.do) == ({}, 3, "tell_model")
    assert (run.concurrency, run.queue_timeout) == ("auto", 600.0)


def test_several_rewards(folder: Path) -> None:
    run = load(folder, SMALLEST + 'reward: ["a:b", {use: "c:d", weight: 0.5}]\n')
    assert run.rewards == [("a:b", 1.0), ("c:d", 0.5)]
    assert load(folder, run.to_json()).reward == run.reward
    assert load(folder, SMALLEST + 'reward: ["a:b", "c:d"]\n', "reward=e:f").rewards == "e:f"
    assert load(folder, SMALLEST + 'reward: "a:b"\n', "reward=null").rewards is None
    assert load(folder, SMALLEST + 'reward: {use: "a:b", weight: 2}\n').rewards == [("a:b", 2.0)]
    for wrong, says in (
        ('["a:b", {use: "c:d", wieght: 1}]', ":5: reward.1: unknown key 'wieght'; did you mean 'weight'?"),
        ('["a:b", 3]', ":5: reward.1 must be a mapping, got 3"),
        ("exact_anser", ":5: reward.0.use: reward 'exact_anser' does not exist; did you mean 'exact_answer'? Or give"),
        ('[{use: "a:b", weight: .inf}]', ":5: reward.0.weight"),
    ):
        (problem,) = problems(folder, SMALLEST + f"reward: {wrong}\n")
        assert problem.startswith(says)


def test_several_agents(folder: Path) -> None:
    run = load(folder, SMALLEST.replace("a.yaml", "{one: a.yaml, two: /b.yaml}"))
    assert run.agent == {"one": folder / "configs/runs/a.yaml", "two": Path("/b.yaml")}


def test_overrides_and_interpolation(folder: Path) -> None:
    text = SMALLEST + "n: 4\nlimit: ${n}\nsampling: {temperature: 1.0}\n"
    run = load(
        folder, text, "n=2", "sampling.top_p=0.5", "prompts=mine.jsonl", "engine.model=m", "agent.limits.tool_calls=3",
        "agent.states.GENERATING.timeout=5", "engines.judge={kind: scripted}", "out=${agent}.out",
    )  # fmt: skip
    assert (run.n, run.limit) == (2, 2)
    assert run.sampling == Sampling(temperature=1.0, top_p=0.5)
    assert run.engine == {"kind": "scripted", "model": "m"}
    assert run.engines == {"judge": {"kind": "scripted"}}
    assert run.agent_overrides == ("agent.limits.tool_calls=3", "agent.states.GENERATING.timeout=5")
    assert run.agent == folder / "configs/runs/a.yaml", "what the file names is beside the file"
    assert run.prompts == folder / "mine.jsonl", "what the command line names is where the command was given"
    assert run.out == folder / "a.yaml.out"
    assert load(folder, text, "agent=b.yaml").agent == folder / "b.yaml"


def test_to_json_reads_back(folder: Path) -> None:
    run = load(folder, EVERY_KEY, "agent.limits.tool_calls=3")
    data = json.loads(run.to_json())
    assert data.pop("agent_overrides") == ["limits.tool_calls=3"]
    assert data["validate"] is True
    again = load(folder, json.dumps(data))
    assert again.model_dump() == run.model_dump()


def test_a_key_stands_in_the_users_own_file_alone(folder: Path) -> None:
    """Neither a journal nor a tracker has it; who goes on with the run takes it from there."""
    engine = "{kind: openai, urls: [x], api_key: sk-mine}"
    text = SMALLEST.replace("{kind: scripted}", engine) + f"engines: {{judge: {engine}, other: {{kind: scripted}}}}\n"
    run = load(folder, text)
    assert run.engine["api_key"] == run.engines["judge"]["api_key"] == "sk-mine"
    assert "sk-" not in run.to_json()
    recorded = {"run": run.to_json(), "base": str(run.base), "file": str(run.file)}
    assert recorded_config(folder / "out", recorded, []).model_dump(exclude={"out"}) == run.model_dump(exclude={"out"})
    other = recorded_config(folder / "out", recorded, ["engine={kind: scripted}"])
    assert other.engine == {"kind": "scripted"}
    assert "$MINE" in load(folder, text.replace("sk-mine", "$MINE")).to_json()


@pytest.mark.parametrize(
    ("key", "said"), table("jobs")["code that a journal names and the users own file does not is refused"]
)
def test_code_that_a_journal_names_and_the_users_own_file_does_not_is_refused(
    folder: Path, key: str, said: dict[str, Any]
) -> None:
    run = load(folder, SMALLEST)
    recorded = {"run": json.dumps(json.loads(run.to_json()) | said), "base": str(run.base), "file": str(run.file)}
    with pytest.raises(ConfigError, match=re.escape(f"{key}: the run in '{folder}/out' began with")):
        recorded_config(folder / "out", recorded, [])


@pytest.mark.parametrize("case", table("run_files")["cases"], ids=lambda case: str(case)[:60])
def test_mistakes(case: dict[str, Any], folder: Path) -> None:
    """All of them are said in one go, in the order of the file."""
    text = case.get("text", SMALLEST.replace("a.yaml", case.get("agent", "a.yaml")) + case.get("more", ""))
    found = problems(folder, text, *([case["override"]] if "override" in case else []))
    assert found == case["says"] if isinstance(case["says"], list) else found[0].startswith(case["says"])


def test_a_missing_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_run(folder / "nowhere.yaml")


@pytest.mark.parametrize(
    "path", sorted(set(RUNS.glob("*.yaml")) - set(RUNS.glob("*_script.yaml"))), ids=lambda path: path.stem
)
def test_the_runs_that_are_shipped(path: Path) -> None:
    run = load_run(path)
    assert run.agent.is_file()
    assert not isinstance(run.prompts, Path) or run.prompts.is_file()
    assert run.out == Path.cwd() / "runs" / path.stem


def test_paths_of_engines_are_taken_from_where_an_override_is_given(folder: Path) -> None:
    (folder / "mine").mkdir()
    asked = ["engine.model=mine", "engines.judge={kind: replay, run: mine}", "engines.other.kind=transformers"]
    config = load(folder, SMALLEST, *asked, "engines.other.model=embedded:early")
    assert config.engine["model"] == str(folder / "mine")
    assert config.engines["judge"]["run"] == str(folder / "mine")
    assert config.engines["other"]["model"] == "embedded:early"
    assert load(folder, SMALLEST, "engine.model=not_there").engine["model"] == "not_there"
    assert load(folder, SMALLEST.replace("scripted}", "scripted, model: mine}")).engine["model"] == "mine", (
        "the file's own is the file's"
    )


def some_prompts(names: list[str], limit: int | None = None) -> Iterator[dict[str, object]]:
    """Give prompts for ever, unless a limit is known."""
    for number in itertools.count():
        assert number < (limit or 100), "more were taken than the run has"
        yield {"messages": [{"role": "user", "content": f"{names[number % len(names)]} {number}"}]}


def test_prompts_may_come_from_a_function(folder: Path) -> None:
    own = "{use: 'tests.unit.jobs.test_run_config:some_prompts', kwargs: {names: [a, b]}}"
    text = SMALLEST.replace("p.jsonl", own) + "limit: 3\n"
    run = load(folder, text)
    assert [prompt.messages[0]["content"] for prompt in prompts_of(run)] == ["a 0", "b 1", "a 2"]
    assert recorded_run(run.to_json(), folder).prompts == run.prompts
    for broken, message in [
        (text.replace("names:", "nams:"), "TypeError: some_prompts.. got an unexpected keyword argument 'nams'"),
        (text.replace(":some_prompts", ":some_promts"), "did you mean 'some_prompts'?"),
        (text.replace("[a, b]", "[]"), "ZeroDivisionError"),
    ]:
        with pytest.raises(ConfigError, match=f"run.yaml:2: prompts .*{message}"):
            prompts_of(load(folder, broken))
    assert load(folder, SMALLEST.replace("p.jsonl", "{use: verifiers, taskset: t}")).prompts == PromptSource(
        use="fsm_rollout.environment.verifiers:prompts", kwargs={"taskset": "t"}
    )
    assert problems(folder, SMALLEST.replace("p.jsonl", "{uses: t}")) == [
        ":2: prompts: unknown key 'uses'; did you mean 'use'?"
    ]


PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN
OF_TOOLS = FILES["of tools"]


@pytest.mark.parametrize(
    ("template", "tool_format", "system", "told"),
    [
        (PLAIN, "hermes", "", "tools-not-shown"),
        (PLAIN, "auto", "", "tools-not-shown"),
        (PLAIN, "hermes", "system: Call calculate.,", None),
        (PLAIN, "auto", "system: Call calculate.,", "no format known here, and never writes the tools"),
        (WITH_TOOLS, "hermes", "", None),
    ],
)
def test_a_chat_template_that_hides_the_tools_is_refused(
    folder: Path, template: str, tool_format: str, system: str, told: str | None
) -> None:
    """It is that of the run's YAML, used instead of the model's own, which writes them."""
    (folder / "configs/runs/plain.jinja").write_text(template)
    text = OF_TOOLS.replace("FORMAT", tool_format).replace("SYSTEM", system)
    (folder / "configs/runs/a.yaml").write_text(text)
    turns = 'turns: ["The answer is 4."]'
    config = load(folder, SMALLEST.replace("scripted}", f"scripted, {turns}}}") + "chat_template: plain.jinja\n")
    (agent,) = load_agents(config).values()
    assert loads(dump(agent)) == agent
    refused = pytest.raises(ConfigError, match=told) if told else nullcontext()
    with refused, fr.Rollout(agent, config.engine) as rollout:
        prompt = tokenizer().decode(rollout.run(["2 + 2?"]).tensordict["prompts"][0])
        assert ('{"type": "function"' in prompt) is (template is WITH_TOOLS)


THINKS = PLAIN.replace("{{ m.content }}", "{% if m.thinking %}<t>{{ m.thinking }}</t>{% endif %}{{ m.content }}")


@pytest.mark.parametrize("thinks", [True, False])
def test_a_chat_template_without_thinking_is_refused_where_it_is_to_be_closed(folder: Path, thinks: bool) -> None:
    (folder / "configs/runs/plain.jinja").write_text(THINKS if thinks else PLAIN)
    (folder / "configs/runs/a.yaml").write_text(
        OF_TOOLS.replace("FORMAT", "hermes").replace("SYSTEM", "system: calculate,")
    )
    text = SMALLEST.replace("scripted}", "scripted, turns: [Four]}") + "sampling: {thinking_tokens: 3}\n"
    config = load(folder, text + "chat_template: plain.jinja\n")
    refused = pytest.raises(
        ConfigError, match=r"state 'GENERATING': thinking_tokens: \[no-thinking\] the chat template"
    )
    with nullcontext() if thinks else refused:
        fr.Rollout(load_agents(config), config.engine, sampling=config.sampling).close()


def test_a_chat_template_that_is_not_there_is_said(folder: Path) -> None:
    (folder / "configs/runs/a.yaml").write_text(OF_TOOLS.replace("FORMAT", "hermes").replace("SYSTEM", ""))
    with pytest.raises(ConfigError, match=r"run.yaml:5: '.*none.jinja' no such file"):
        load_agents(load(folder, SMALLEST + "chat_template: none.jinja\n"))


@pytest.mark.parametrize(
    ("now", "overrides", "replicas"),
    [
        (2, [], 5),
        (3, [], 3),  # its YAML says something else by now
        (2, ["engine.replicas=2"], 2),
        ("auto", [], "auto"),
    ],
)
def test_a_run_goes_on_with_the_replicas_that_orders_have_left(
    folder: Path, now: int | str, overrides: list[str], replicas: int | str
) -> None:
    counts = 2 if now == 3 else now, now
    began, said = (load(folder, SMALLEST.replace("scripted}", f"scripted, replicas: {count}}}")) for count in counts)
    orders = {"policy": {"replicas": 5}, "gone": {"replicas": 7}}
    goes_on = with_orders(said, orders_left(said, {"run": began.to_json(), REPLICAS: orders}, overrides))
    assert (goes_on.engine["replicas"], goes_on.engines) == (replicas, {})
    assert with_orders(said, orders_left(said, {"run": began.to_json()})) == said
