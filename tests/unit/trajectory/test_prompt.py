"""Prompts files: what is right comes through whole, what is wrong is named with its line."""

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.prompt import Prompt, as_prompts, read_prompts
from fsm_rollout.trajectory.settings import Limits, Sampling
from tests.cases import cases
from tests.histories import json_values

ASK = {"messages": [{"role": "user", "content": "?"}]}


def fits_64_bits(value: Any) -> bool:
    """Return whether every number in it does; larger ones are refused, which has a test of its own."""
    return all(abs(int(digits)) < 2**63 for digits in re.findall(r"\d+", json.dumps(value)))


unicode_values = json_values.filter(fits_64_bits)  # Hypothesis draws no lone surrogates, which JSON cannot carry
records = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), min_size=1, max_size=2
        )
    },
    optional={
        "answer": unicode_values,
        "tools_kwargs": st.dictionaries(st.text(max_size=3), unicode_values, max_size=2),
        "agent": st.text(),
        "limits": st.just({"tool_calls": 2}),
        "sampling": st.just({"temperature": 0.5}),
    },
)


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def problems(path: Path, limit: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, limit)
    assert {problem.file for problem in caught.value.problems} == {str(path)}
    return [str(problem).removeprefix(str(path)) for problem in caught.value.problems]


@settings(max_examples=min(50, settings().max_examples))
@given(drawn=st.lists(records, min_size=1, max_size=4), data=st.data())
def test_jsonl_json_and_python_say_the_same(
    drawn: list[dict[str, Any]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    blank = st.sampled_from(["", "\n", "  \n\r\n"])
    bom, ascii_ = data.draw(st.sampled_from(["", "\ufeff"])), data.draw(st.booleans())
    lines = [data.draw(blank) + json.dumps(record, ensure_ascii=ascii_) for record in drawn]
    jsonl = written(folder / "p.jsonl", bom + "\r\n".join(lines) + data.draw(blank))
    whole = written(
        folder / "p.JSON", bom + json.dumps(drawn, ensure_ascii=ascii_, indent=data.draw(st.none() | st.just(1)))
    )
    prompts = read_prompts(jsonl)
    assert prompts == read_prompts(whole) == as_prompts(drawn)
    assert as_prompts(prompts) == prompts
    for index, (record, prompt) in enumerate(zip(drawn, prompts, strict=True)):
        assert prompt.prompt_id == str(index)
        assert list(prompt.messages) == record["messages"]
        assert prompt.agent == record.get("agent")
        assert prompt.limits == (Limits(tool_calls=2) if "limits" in record else None)
        assert prompt.sampling == (Sampling(temperature=0.5) if "sampling" in record else None)
        assert prompt.extra == {key: record[key] for key in ("answer", "tools_kwargs") if key in record}
    limit = data.draw(st.integers(1, 5))
    assert read_prompts(jsonl, limit) == read_prompts(whole, limit) == prompts[:limit]


def test_parquet(tmp_path: Path) -> None:
    rows = [
        {**ASK, "prompt_id": "a", "answer": "4", "when": datetime.date(2020, 1, 2), "limits": {"tool_calls": 2}},
        {"messages": [{"role": "assistant", "content": "!", "name": "x"}, {"role": "user", "content": "?"}]},
    ]
    table = pyarrow.table({key: [row.get(key) for row in rows] for key in rows[0]})
    write_table(table, tmp_path / "p.parquet")
    first, second = read_prompts(tmp_path / "p.parquet")
    assert (first.prompt_id, first.limits) == ("a", Limits(tool_calls=2))
    assert first.extra == {"answer": "4", "when": "2020-01-02"}
    assert (second.prompt_id, second.limits, second.extra) == ("1", None, {})
    assert list(first.messages) == ASK["messages"], "no `name` that only another row has"
    assert list(second.messages) == rows[1]["messages"]

    write_table(pyarrow.table({"messages": [[{"role": "user", "content": "?"}], []]}), tmp_path / "bad.parquet")
    assert problems(tmp_path / "bad.parquet") == [": record 2: messages: there are none; a prompt needs at least one"]
    (problem,) = problems(written(tmp_path / "text.parquet", "hello"))
    assert problem.startswith(": is not parquet that can be read: ")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "p.parquet", "")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert problems(path) == [": reading parquet needs pyarrow: pip install 'fsm-rollout[parquet]'"]


@cases(
    "trajectory",
    ({"mesages": [ASK]}, ["'messages' is missing; is it 'mesages'?"]),
    ([ASK], ["a prompt is a mapping with 'messages', got a list"]),
    ({**ASK, "limits": {"tool_cals": 3}}, ["limits: unknown key 'tool_cals'; did you mean 'tool_calls'?"]),
    ({**ASK, "limits": {"tool_calls": "3"}}, ["limits.tool_calls should be a valid integer, got '3'"]),
    ({**ASK, "sampling": {"top_p": 2}}, ["sampling.top_p should be less than or equal to 1, got 2"]),
    ({**ASK, "prompt_id": 3}, ["prompt_id should be a valid string, got 3"]),
)
def test_wrong_fields(record: Any, expected: list[str], tmp_path: Path) -> None:
    good = json.dumps(ASK)
    jsonl = written(tmp_path / "p.jsonl", f"{good}\n\n{json.dumps(record)}\n{good}\n")
    assert problems(jsonl) == [f":3: {line}" for line in expected]
    whole = written(tmp_path / "p.json", f"[{good},\n {good},\n\n{json.dumps(record)}\n]")
    assert problems(whole) == [f":4: {line}" for line in expected]
    if not isinstance(record, str):
        with pytest.raises(ConfigError) as caught:
            as_prompts([ASK, record])
        assert [str(problem) for problem in caught.value.problems] == [f"prompts[1]: {line}" for line in expected]


def test_an_assistants_message_may_have_calls_for_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    (prompt,) = as_prompts([{"messages": [*ASK["messages"], call, {"role": "tool", "content": "4"}]}])
    assert prompt.messages[1] == call


@cases("trajectory", ("[" * 100_000, [":2: is nested too deeply to be read"]))
def test_lines_that_are_not_json(text: str, expected: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", f"{json.dumps(ASK)}\n{text}\n{json.dumps(ASK)}\n")
    assert problems(path) == expected


@cases("trajectory", ("[\n" + "[" * 100_000, "is nested too deeply to be read"))
def test_files_that_are_not_json(text: str, expected: str, tmp_path: Path) -> None:
    assert problems(written(tmp_path / "p.json", text))[-1] == f":2: {expected}"


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", ""), ("b.jsonl", "\ufeff \n\n"), ("c.json", "[]"), ("d.json", " ")):
        assert problems(written(tmp_path / name, text)) == [": holds no prompts"]
    not_a_list = ": a .json file of prompts holds one list of them; one prompt per line is .jsonl"
    assert problems(written(tmp_path / "e.json", json.dumps(ASK))) == [not_a_list]
    assert problems(tmp_path / "missing.jsonl") == [": no such file"]
    (tmp_path / "folder.json").mkdir()
    assert problems(tmp_path / "folder.json") == [": is a directory"]
    known = "prompts are read from .jsonl, .json, .parquet files"
    assert problems(written(tmp_path / "p.csv", "")) == [f": has the extension '.csv'; {known}"]
    assert problems(written(tmp_path / "p", "")) == [f": has no extension; {known}"]


@pytest.mark.parametrize(("name", "before"), [("p.jsonl", ""), ("p.json", "[\n")])
def test_bytes_that_are_not_utf8(name: str, before: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(f"{before}{json.dumps(ASK)}\n".encode() + b'{"a": "\xe9"}')
    assert problems(path)[-1] == f":{2 + before.count(chr(10))}: is not UTF-8 (byte 0xe9)"


def test_all_problems_in_one_go_but_not_hundreds_of_them(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", "".join(f"{{}}\n{'[' * depth}\n" for depth in range(1, 26)))
    expected = problems(path)
    assert expected[:2] == [":1: 'messages' is missing (and so in 24 more)", ":2: not JSON (column 2): Expecting value"]
    assert (len(expected), expected[-1]) == (21, ": and 6 more")
    assert len(problems(path, limit=4)) == 3, "what is not read is not judged"


def test_ids_are_each_prompts_own(tmp_path: Path) -> None:
    records = [{**ASK, "prompt_id": "1"}, ASK, {**ASK, "prompt_id": "x"}, {**ASK, "prompt_id": "x"}]
    path = written(tmp_path / "p.jsonl", "\n".join(map(json.dumps, records)))
    assert problems(path) == [
        ":2: prompt_id '1' was used before (line 1)",
        ":4: prompt_id 'x' was used before (line 3)",
    ]
    with pytest.raises(ConfigError, match=r"prompts\[3\]: prompt_id 'x' was used before \(prompts\[2\]\)"):
        as_prompts(records)
    assert problems(written(path, json.dumps({**ASK, "prompt_id": ""}))) == [
        ":1: prompt_id: text should have at least 1 character, got ''"
    ]


def test_texts_and_prompts_from_python() -> None:
    text, own = as_prompts(["what is 1 + 1?", Prompt(messages=({"role": "user", "content": "?"},), prompt_id="own")])
    assert list(text.messages) == [{"role": "user", "content": "what is 1 + 1?"}]
    assert (text.prompt_id, own.prompt_id) == ("0", "own")
    assert as_prompts([]) == []
    for item, kind in (("what is 1 + 1?", "text"), (ASK, "prompt"), (own, "prompt")):
        with pytest.raises(ConfigError, match=f"must come as a list, got one {kind}"):
            as_prompts(item)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="holds something that is not plain data"):
        as_prompts([{**ASK, "answer": object()}])


def test_prompts_are_frozen() -> None:
    (prompt,) = as_prompts([{**ASK, "answer": 4}])
    with pytest.raises(ValueError, match="frozen"):
        prompt.agent = "other"  # type: ignore[misc]
    prompt.extra["answer"] = 5
    assert prompt.extra == {"answer": 4}


def test_what_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written down"):
        as_prompts([{"messages": [{"role": "user", "content": "?"}], "answer": 10**30}])


@pytest.mark.parametrize("answer", [object(), 10**30, "\ud800"], ids=["object", "integer", "surrogate"])
def test_a_prompt_made_in_python_is_checked_where_it_is_made(answer: Any) -> None:
    with pytest.raises(ConfigError, match="Prompt: the values cannot be written down"):
        Prompt(messages=({"role": "user", "content": "?"},), prompt_id="own", answer=answer)


def test_prompts_are_read_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of thousands are read before the first of them runs."""
    monkeypatch.setattr(Prompt, "model_copy", None)
    lines = [{"messages": ASK["messages"]}, {"messages": ASK["messages"], "prompt_id": "mine"}]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    prompts = read_prompts(file)
    assert [prompt.prompt_id for prompt in prompts] == ["0", "mine"]
    assert as_prompts(prompts) == prompts


@cases("trajectory")
def test_sampling_has_bounds(key: str, taken: list[float], refused: list[float]) -> None:
    for value in taken:
        assert getattr(Sampling(**{key: value}), key) == value
    for value in refused:
        with pytest.raises(ConfigError, match=key):
            Sampling(**{key: value})
