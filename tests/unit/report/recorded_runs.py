"""Runs to look at: journals written from events that a test chose, with text of every nasty kind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.chat.markers import Part, encoder_for
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    MessagesAppended,
    Prompted,
    PromptExtended,
    Scored,
    ToolCall,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.tokens import MediaSpan
from tests.embedded import tokenizer
from tests.events import opened, prompted
from tests.kit import ROOT

CONFIGS = ROOT / "configs"
NASTY = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "&amp; 'quotes\" </script x"
)
ODD = "\x00\x07\x1b[31m \u202eabc שלום مرحبا 👩‍👩‍👧‍👦\t\r\u2028 {{ 7 * 7 }} ${x} `y`"


class Elements(HTMLParser):
    """Collects a page's elements and attributes as a browser's parser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def write_run(
    folder: Path, histories: dict[str, Sequence[AnyEvent]], graph: AgentGraph | None = None, **config: Any
) -> Path:
    """Write a run's folder that holds these trajectories, and nothing of a run's end."""
    graph = graph or load_agent(CONFIGS / "agents/tool_user.yaml")
    run = {"engine": {"kind": "scripted", "tokenizer": "embedded"}, "engines": {}, **config}
    engines = {"policy": {"kind": "scripted", "tokenizer": "embedded"}}
    metadata = {"agents": {graph.agent: dump(graph)}, "engines": engines, "run": run, "base": str(folder)}
    with Journal(folder / "journal.sqlite", metadata=metadata) as journal:
        for trajectory_id, events in histories.items():
            for event in events:
                journal.append(trajectory_id, event)
    return folder


def history(
    trajectory_id: str = "0/0",
    *,
    at: float = 100.0,
    text: str = "The answer is 3.",
    told: str = "3",
    score: float | None = 1.0,
    stop_reason: str = "answered",
    failure: str | None = None,
    group_id: str = "0",
    versions: Sequence[int] = (0, 1),
    replica: str = "r0",
) -> list[AnyEvent]:
    """A trajectory of the agent `tool_user`: a call that takes 2 s, an answer, one reply, the end after 10 s.

    Each turn's first half was sampled under ``versions[0]``, the rest under ``versions[1]``.
    """

    def ids(words: str) -> array[int]:
        return array("i", tokenizer().encode(words, add_special_tokens=False))

    def generated(when: float, words: str, seconds: float, **facts: Any) -> Generated:
        sampled = ids(words)
        half = len(sampled) // 2
        return Generated(
            at=at + when,
            context="main",
            state="GENERATING",
            ids=sampled,
            logprobs=array("f", [-(place % 9) / 2 for place in range(len(sampled))]),
            versions=[(half, versions[0]), (len(sampled) - half, versions[1])],
            finish_reason="stop",
            message={"role": "assistant", "content": words},
            queue_seconds=0.5,
            seconds=seconds,
            replica=replica,
            **facts,
        )

    def moved(when: float, row: int, trigger: str, source: str, dest: str, **facts: Any) -> Transitioned:
        return Transitioned(at=at + when, trigger=trigger, source=source, dest=dest, spent={}, row=row, **facts)

    glued = encoder_for(tokenizer()).encode_parts([Part("\n"), Part(told, environment=True)], "guard")
    call = ToolCall(id="c1", name="calculate", arguments={"left": 1, "operator": told, "right": 2})
    answer = {"role": "tool", "content": told, "tool_call_id": "c1", "name": "calculate"}
    asked = {"role": "user", "content": text}
    events: list[AnyEvent] = [
        prompted(
            trajectory_id, at=at, group_id=group_id, parent_id=None, agent="tool_user", messages=[asked], seed=1,
            extra={"answer": text}, limits={"assistant_turns": 3.0, "tool_calls": 1.0, "wall_seconds": None},
        ),
        opened(
            at=at, messages=[{"role": "system", "content": "Be exact."}, asked],
            ids=ids("<|im_start|>user\n" + text + "<|im_end|>\n"),
        ),
        moved(0.0, 0, "prompted", "PENDING", "GENERATING"),
        generated(3.0, "<tool_call>\n{}\n</tool_call><|im_end|>", 2.5, attempts=[call]),
        moved(3.0, 1, "generated", "GENERATING", "PROCESSING_TOOLS"),
        Called(
            at=at + 5.0,
            state="PROCESSING_TOOLS",
            id="c1",
            name="calculate",
            arguments=call.arguments,
            result=told,
            failure=failure,
            bad=failure is not None,
            seconds=2.0,
        ),
        MessagesAppended(at=at + 5.0, context="main", state="PROCESSING_TOOLS", messages=[answer]),
        moved(5.0, 3, "tools_done", "PROCESSING_TOOLS", "GENERATING"),
        PromptExtended(
            at=at + 5.0,
            context="main",
            state="PROCESSING_TOOLS",
            ids=array("i", glued.ids),
            guarded=glued.guarded,
            guarded_at=list(glued.guarded_at),
        ),
        generated(8.0, text, 2.0),
        moved(8.0, 2, "generated", "GENERATING", "INTERACTING"),
        UserReplied(at=at + 9.0, context="main", state="INTERACTING", seconds=1.0),
        Scored(at=at + 9.0, value=0.25, turn=1, source="INTERACTING"),
        moved(10.0, 5, "interaction_done", "INTERACTING", "TERMINATED", stop_reason=stop_reason),
        Ended(at=at + 10.0, stop_reason=stop_reason),
    ]  # fmt: skip
    if score is not None:
        events.append(Scored(at=at + 10.0, value=score, source="reward"))
    return events


PADS = 700
"""Tokens that each picture is in :func:`showing`."""


def showing(question: Sequence[StoredPicture], answer: Sequence[StoredPicture], **facts: Any) -> list[AnyEvent]:
    """The usual history, whose question and tool's answer also show pictures, before their text."""

    def parts(message: dict[str, Any], pictures: Sequence[StoredPicture]) -> dict[str, Any]:
        images = [{"type": "image", "image": picture} for picture in pictures]
        return message | {"content": [*images, {"type": "text", "text": message["content"]}]}

    def shown(event: Any, pictures: Sequence[StoredPicture]) -> Any:
        media = [MediaSpan(1 + at * (PADS + 1), PADS, picture, 5) for at, picture in enumerate(pictures)]
        pads = array("i", [6] + ([5] * PADS + [6]) * len(pictures))
        return replace(event, ids=pads + event.ids, guarded_at=[], media=media)

    events: list[AnyEvent] = []
    for event in history(**facts):
        if isinstance(event, Prompted):
            event = replace(event, messages=[parts(event.messages[0], question)])
        elif isinstance(event, ContextOpened):
            *before, asked = event.messages
            event = shown(replace(event, messages=[*before, parts(asked, question)]), question)
        elif isinstance(event, MessagesAppended):
            event = replace(event, messages=[parts(event.messages[0], answer)])
        elif isinstance(event, PromptExtended):
            event = shown(event, answer)
        events.append(event)
    return events
