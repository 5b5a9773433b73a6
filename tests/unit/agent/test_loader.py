"""Loading: law 1, every spelling of the YAML, and every kind of mistake with its place."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.json_schema import agent_schema
from fsm_rollout.agent.loader import load_agent, loads, read_agent
from fsm_rollout.agent.yaml import source
from fsm_rollout.agent.yaml.dump import dump
from fsm_rollout.agent.yaml.overrides import escape_interpolation, interpolate, unescape_interpolation
from fsm_rollout.agent.yaml.source import SourceMap, read_yaml
from fsm_rollout.cli import app
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory import config_errors
from tests.cases import says, table
from tests.graphs import graphs, texts, values
from tests.kit import ROOT

CONFIGS = sorted((ROOT / "configs" / "agents").glob("*.yaml"))

CASES = table("loading")
AGENT, CUSTOM = CASES["agents"]["solver"], CASES["agents"]["own"]


def problems(text: str, base: str | Path = ".", overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, base, overrides, name="a.yaml")
    return str(caught.value).splitlines()


def changed(old: str, new: str) -> str:
    assert AGENT.count(old) >= 1, old
    return AGENT.replace(old, new, 1)


# Law 1, and what freezing means


@given(graphs())
def test_what_is_dumped_loads_as_the_same_graph(graph: AgentGraph) -> None:
    assert loads(dump(graph)) == graph


@given(graphs())
def test_graphs_copy_pickle_and_hash(graph: AgentGraph) -> None:
    for copied in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert copied == graph
        assert hash(copied) == hash(graph)
        assert type(copied.states) is type(graph.states)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_agents_load_dump_and_fit_the_schema(path: Path) -> None:
    graph = load_agent(path)
    assert loads(dump(graph)) == graph
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(data) <= set(agent_schema()["$defs"]["AgentGraph"]["properties"])
    assert accepts(data)


accepts = jsonschema.Draft202012Validator(agent_schema()).is_valid


@given(graphs())
def test_the_schema_accepts_whatever_loads(graph: AgentGraph) -> None:
    assert accepts(yaml.safe_load(dump(graph)))


def test_the_schema_refuses_unknown_keys_and_wrong_types() -> None:
    for old, new in [
        ("max_tokens: 512", "max_tokens: many"),
        ("PENDING:\n", "PENDING: {tiemout: 3}\n"),
        ("agent:", "agnet:"),
    ]:
        assert not accepts(yaml.safe_load(changed(old, new)))
    assert not accepts(yaml.safe_load(changed("has_tool_calls", "has_tool_cals")))
    assert accepts(yaml.safe_load(changed("PENDING:\n", 'PENDING: {handler: "own:Handler", depth: 3}\n')))
    assert accepts(yaml.safe_load(changed("max_tokens: 512", "max_tokens: '${x}'")))


def test_an_interaction_of_one_word_has_its_arguments_beside_it() -> None:
    def built(interaction: str) -> AgentGraph:
        return loads(AGENT + f"interaction: {interaction}\n")

    graph = built("{use: openenv, url: 'http://127.0.0.1:1', repeatable: true}")
    assert graph.interaction is not None
    assert graph.interaction.use == "fsm_rollout.environment.openenv:OpenEnv"
    assert graph.interaction.kwargs == {"url": "http://127.0.0.1:1", "repeatable": True}
    assert loads(dump(graph)) == graph
    assert accepts(yaml.safe_load(AGENT) | {"interaction": {"use": "openenv", "url": "http://127.0.0.1:1"}})
    assert not accepts(yaml.safe_load(AGENT) | {"interaction": {"use": "own:User", "url": "here"}})


def test_mappings_of_a_graph_cannot_be_changed() -> None:
    graph = loads(AGENT)
    states: Any = graph.states
    for change in (
        lambda: states.update(A=1),
        lambda: states.pop("PENDING"),
        lambda: states.__setitem__("A", 1),
        lambda: states.setdefault("A", 1),
        lambda: states.clear(),
        lambda: states.popitem(),
        lambda: states.__delitem__("PENDING"),
        lambda: states.__ior__({}),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert graph.states == dict(graph.states)


# Reading YAML


@given(st.dictionaries(texts, values, max_size=3))
def test_json_is_read_as_itself(data: dict[str, Any]) -> None:
    text = json.dumps(data).replace("Infinity", "1.0").replace("\x7f", "\\u007f")
    expected = json.loads(text)
    source = SourceMap()
    assert read_yaml(text, source) == (expected, [])


@given(texts)
def test_escaped_text_comes_back_from_interpolation(text: str) -> None:
    data: dict[str, Any] = {"text": escape_interpolation(text)}
    assert interpolate(data, SourceMap()) == []
    assert data == {"text": text}


@pytest.mark.parametrize(
    ("value", "message"), [*CASES["surprises of YAML"], ("9" * 5000, "…is not a number that can be read")]
)
def test_surprises_of_yaml_are_problems(value: str, message: str) -> None:
    _, found = read_yaml(f"key: {value}", SourceMap("f"))
    assert says([f"f:1: {message}"], [*map(str, found)])


def test_plain_values_of_yaml() -> None:
    text = "{a: 1_000, b: 1e3, c: .5, d: ~, e: 2024-01-02, f: -0, g: +.inf, h: TRUE, i: '08', j: =, k: 1.}"
    data, found = read_yaml(text, SourceMap())
    assert found == []
    expected = dict(
        zip("abcdefghijk", [1000, 1e3, 0.5, None, "2024-01-02", 0, float("inf"), True, "08", "=", 1.0], strict=True)
    )
    assert data == expected
    assert isinstance(data, dict)
    assert [type(v) for v in data.values()] == [type(v) for v in expected.values()]


def test_merge_keys_and_aliases() -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\none: {<<: *x, b: 5}\nmany: {<<: [*x, *y]}\nagain: *x"
    data, found = read_yaml(text, SourceMap())
    assert found == []
    assert isinstance(data, dict)
    assert data["one"] == {"a": 1, "b": 5}
    assert data["many"] == {"a": 1, "b": 2, "c": 4}
    assert data["again"] == data["x"]
    assert data["again"] is not data["x"]


def test_lines_of_every_path() -> None:
    source = SourceMap("f")
    read_yaml("a:\n  b: 1\n  c:\n  - 2\n  - d: 3\n    e: |\n       text\n       more\n", source)
    assert source.locate(("a", "b")) == ("f", 2)
    assert source.locate(("a", "c", 1, "e")) == ("f", 6)
    assert source.locate(("a", "c", 1, "unknown", "deeper")) == ("f", 5)
    assert source.locate(("a", "c", 1, "e"), 2) == ("f", 8)
    assert source.locate(("a", "b"), 2) == ("f", 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((text.encode("latin1"), said) for text, said in CASES["no agents"]),
        (b"[" * 600, "is nested too deeply"),
        (
            b"a: &a [x, x]\n"
            + b"".join(
                b"k%d: &k%d [*%s, *%s]\n" % (i, i, p, p) for i, p in enumerate([b"a", *(b"k%d" % i for i in range(40))])
            ),
            "more than 100,000 values",
        ),
        (b"a: 1\n" * 300_000, "1,500,000 bytes; at most 1,048,576 are read"),
    ],
    ids=lambda value: value[:12].decode("latin1") if isinstance(value, bytes) else None,
)
def test_files_that_are_no_agents(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_agent(path)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{path}:")
    assert says in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_agent(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_agent(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_agent("a\0b")


# Mistakes of every kind


def text_of(case: dict[str, Any]) -> str:
    text: str = CASES["agents"][case.get("in", "solver")]
    for old, new in case.get("change", {}).items():
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("case", CASES["mistakes"], ids=lambda case: str(case.get("change") or case["overrides"])[:60])
def test_mistakes_are_told_in_their_places(case: dict[str, Any], tmp_path: Path) -> None:
    for file, content in case.get("files", {}).items():
        (tmp_path / file).write_text(text_of(content) if isinstance(content, dict) else content, "utf-8")
    found = [line.replace(f"{tmp_path}/", "") for line in problems(text_of(case), tmp_path, case.get("overrides", ()))]
    assert says(case["says"], found), "\n".join(found)


def test_predicates_in_every_spelling() -> None:
    graph = loads(
        changed("has_tool_calls", "[has_tool_calls, {text_contains: x}], unless: {visits_over: {PENDING: 3}}")
    )
    row = graph.transitions[1]
    assert [(p.name, p.argument) for p in row.conditions] == [("has_tool_calls", None), ("text_contains", "x")]
    assert [(p.name, p.argument) for p in row.unless] == [("visits_over", {"PENDING": 3})]


# Files


def test_texts_by_file(tmp_path: Path) -> None:
    (tmp_path / "sys.md").write_text("Be good.\n", encoding="utf-8")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "p.jinja").write_bytes(b"a\r\n{{ task }}\n")
    text = changed("agent: solver", "agent: solver\ncontexts: {main: {system: sys.md}}")
    text = text.replace("{sampling", "{prompt: deep/p.jinja, sampling")
    graph = loads(text, tmp_path)
    assert graph.contexts["main"].system == "Be good."
    assert graph.states["GENERATING"].prompt == "a\n{{ task }}"
    graph = loads(text.replace("sys.md", "see sys.md").replace("deep/p.jinja", "{text: p.jinja}"), tmp_path)
    assert graph.contexts["main"].system == "see sys.md"
    assert graph.states["GENERATING"].prompt == "p.jinja"
    assert loads(dump(graph)) == graph


def test_agents_as_tools(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "helper.yaml").write_text(
        changed("agent: solver", "agent: helper\ncontexts: {main: {system: s.md}}"), encoding="utf-8"
    )
    (tmp_path / "sub" / "s.md").write_text("Help.", encoding="utf-8")
    graph = loads(changed("tools:\n", "tools:\n  helper: {agent: sub/helper.yaml, description: Helps.}\n"), tmp_path)
    helper = graph.tools["helper"].agent
    assert helper is not None
    assert helper.contexts["main"].system == "Help."
    assert loads(dump(graph)) == graph


# Interpolation and overrides


def test_interpolation_keeps_types() -> None:
    assert loads(changed("tool_calls: 16", "tool_calls: '${limits.assistant_turns}'")).limits.tool_calls == 8


def test_literal_marks_of_omegaconf() -> None:
    graph = loads(changed("agent: solver", 'agent: solver\ndescription: "\\\\${a} ???"'))
    assert graph.description == "${a} ???"
    assert loads(changed("agent: solver", 'agent: solver\ndescription: "???"')).description == "???"


def test_overrides() -> None:
    overrides = (
        "limits.assistant_turns=4",
        "limits.bad_calls=${limits.assistant_turns}",
        "states.GENERATING.timeout=2.5",
        "transitions[2].stop_reason=enough",
        "transitions.1.unless=[all_calls_bad]",
        "limits.tool_calls=2",
        "contexts={main: {system: Hi}}",
    )
    graph = loads(AGENT, overrides=overrides)
    assert (graph.limits.assistant_turns, graph.limits.bad_calls, graph.limits.tool_calls) == (4, 4, 2)
    assert graph.states["GENERATING"].timeout == 2.5
    assert graph.transitions[2].stop_reason == "enough"
    assert graph.transitions[1].unless[0].name == "all_calls_bad"
    assert graph.contexts["main"].system == "Hi"


# Custom handlers


def test_options_of_a_custom_handler() -> None:
    graph = loads(CUSTOM)
    assert graph.states["OWN"].options == {"depth": 3}
    assert loads(dump(graph)) == graph
    assert "options" not in dump(graph)


# The command line


Command = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Give the command line to type, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_check_reports_all_files(run: Command, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(AGENT, encoding="utf-8")
    (tmp_path / "bad.yaml").write_text(AGENT.replace("TERMINATED", "TERMINATE"), encoding="utf-8")
    done = run("check", "bad.yaml", "good.yaml", "none.yaml")
    assert done.exit_code == 2
    assert done.stdout.startswith("solver (good.yaml): ends within 18 ")
    assert done.stderr.splitlines() == [
        "bad.yaml:12: transition 3: dest 'TERMINATE' is not defined; did you mean 'TERMINATED'? [rule 1]",
        "none.yaml: no such file",
    ]


def test_check_names_the_tools_that_have_no_bound_of_their_own(run: Command, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(AGENT, encoding="utf-8")
    code = '{use: "fsm_rollout.tools.calculator:calculate"'
    note = "  calculate: no response_tokens, so a result is cut at half of what the limits leave"
    assert note in run("check", "good.yaml").stdout.splitlines()
    (tmp_path / "bound.yaml").write_text(changed(code, code + ", response_tokens: 9"), encoding="utf-8")
    assert "response_tokens" not in run("check", "bound.yaml").stdout


def test_check_says_what_becomes_of_state_when_a_trajectory_is_resumed(run: Command, tmp_path: Path) -> None:
    here = "tests.unit.states.test_restoring"
    tools = (
        f'{{find: {{use: "{here}:find"}}, notes: {{use: "{here}:Notebook"}}, kept: {{use: "{here}:Keeping"}}, '
        f'again: {{use: "{here}:Notebook", repeatable: true}}, files: {{mcp: {{command: [x]}}}}, '
        "shared: {mcp: {command: [x], session: shared}}}"
    )
    text = AGENT.replace('tools:\n  calculate: {use: "fsm_rollout.tools.calculator:calculate"}', f"tools: {tools}")
    (tmp_path / "a.yaml").write_text(text + f'interaction: {{use: "{here}:Counting"}}\n', encoding="utf-8")
    (tmp_path / "b.yaml").write_text(AGENT + "interaction: {use: model, max_turns: 3}\n", encoding="utf-8")
    (tmp_path / "c.yaml").write_text(AGENT + "interaction: {use: openenv, url: 'http://x'}\n", encoding="utf-8")
    done = run("check", "a.yaml", "b.yaml", "c.yaml")
    assert [
        line.replace("; a trajectory that is resumed", "") for line in done.stdout.splitlines() if "state" in line
    ] == [
        "  notes: keeps state begins anew",
        "  kept: keeps state goes on from its snapshot",
        "  again: keeps state makes its calls again and goes on",
        "  files: keeps state begins anew",
        f"  interaction {here}:Counting: keeps state begins anew",
        "  interaction fsm_rollout.environment.openenv:OpenEnv: keeps state begins anew",
    ]


def test_the_schema_is_printed(run: Command) -> None:
    done = run("schema")
    assert json.loads(done.stdout) == agent_schema()


def test_reading_says_where_everything_stands(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AGENT, encoding="utf-8")
    reading = read_agent(tmp_path / "a.yaml")
    assert reading.graph == loads(AGENT)
    assert reading.problems == ()
    assert reading.source.locate(("states", "GENERATING", "timeout")) == (str(tmp_path / "a.yaml"), 7)


# -- what is too much


@pytest.mark.parametrize("count", [11, 100, 187, 500])
@pytest.mark.parametrize("part", ["${", "${oc.env:"])
def test_deep_interpolations_are_refused_in_one_short_line(part: str, count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f'initial: "{part * count}agent{"}" * count}"\n' + AGENT)
    (line,) = [text for text in str(caught.value).splitlines() if "interpolation failed" in text]
    assert "more than 10 of them stand within one another" in line
    assert len(line) < 200


def test_a_file_is_read_up_to_its_bounds_and_refused_one_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_VALUES", 4)  # a mapping, its two values, and the one in the list
    monkeypatch.setattr(source, "MAX_DEPTH", 2)
    assert read_yaml("a: 1\nb: [2]", SourceMap("a.yaml")) == ({"a": 1, "b": [2]}, [])
    for text, words in (("a: 1\nb: [2, 3]", "more than 4 values"), ("b: [[2]]", "nested too deeply")):
        _, (problem,) = read_yaml(text, SourceMap("a.yaml"))
        assert words in problem.message


@pytest.mark.parametrize("count", [60, 300, 5_000])
def test_deep_values_are_refused(count: int) -> None:
    text = "[" * count + '"${agent}"' + "]" * count
    with pytest.raises(ConfigError, match="is nested too deeply to be read"):
        loads(f"initial: {text}\n" + AGENT)


def test_many_unknown_keys_are_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(config_errors, "did_you_mean", lambda word, known: asked.append(word) or "")
    with pytest.raises(ConfigError) as caught:
        loads(AGENT + "".join(f"k{number}: 1\n" for number in range(5_000)))
    assert len(caught.value.problems) == config_errors.MOST + 1
    assert "and 4,900 more problems" in str(caught.value)
    assert len(asked) == config_errors.MOST


def test_a_file_of_very_many_lines_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "compose", None)  # reading seventy thousand lines takes ten seconds
    with pytest.raises(ConfigError) as caught:
        loads(AGENT + "".join(f"k{number}: 1\n" for number in range(70_000)))
    assert "lines; at most 10,000 are read" in str(caught.value)
    assert len(caught.value.problems) == 1


@given(st.text(st.sampled_from("\\\\${}a"), max_size=12))
@example("\\\\${a}")
def test_what_is_written_with_a_dollar_comes_back(text: str) -> None:
    assert unescape_interpolation(escape_interpolation(text)) == text
