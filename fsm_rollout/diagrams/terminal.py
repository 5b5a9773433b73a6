"""A run or a trajectory in the terminal: compact, in the colours of the pages.

Invariant: text from a model or a tool is only ever printed as text: no markup, no control sequence gets through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsm_rollout.diagrams.cards import Card, cards
from fsm_rollout.diagrams.figures import Figures
from fsm_rollout.diagrams.moments import KINDS, covered, stays, stretches
from fsm_rollout.diagrams.pages import duration, number
from fsm_rollout.diagrams.palette import colour_of
from fsm_rollout.diagrams.recorded import Recorded, RecordedRun
from fsm_rollout.diagrams.token_texts import TokenTexts, visible
from fsm_rollout.diagrams.trajectory import describe, ending_of
from fsm_rollout.events import Transitioned
from fsm_rollout.trajectory import Stream

ROWS = 20
TOKENS_SHOWN = 160
"""Tokens of one card; the first half and the last."""
TEXT_SHOWN = 200


class _Texts:
    """What one stream's tokens look like, by position."""

    def __init__(self, stream: Stream, known: TokenTexts | None) -> None:
        self._vocabulary = known.vocabulary(stream.tokens.ids) if known else {}
        self._spread = known.spread(stream.tokens) if known else {}
        self.markers = known.markers if known else {}

    def at(self, position: int, id_: int) -> str:
        """Return the text of a token; its id where the tokenizer is not at hand."""
        text = self._spread.get(position, self._vocabulary.get(id_))
        return f"{id_} " if text is None else visible(text)


def run_view(run: RecordedRun) -> RenderableType:
    """Return what a run came to, and its slowest trajectories."""
    figures = Figures()
    visits: dict[str, int] = {}
    for recorded in run.histories():
        figures.add(recorded)
        for state, count in recorded.trajectory.visits.items():
            visits[state] = visits.get(state, 0) + count
    lines = figures.lines
    order = [state for graph in run.agents.values() for state in graph.states]
    groups = len({line.group_id for line in lines})
    head = Text(f"{run.folder}: {len(lines):,} {'trajectory' if len(lines) == 1 else 'trajectories'} in ")
    head.append(f"{groups:,} {'group' if groups == 1 else 'groups'}, ")
    head.append(f"{duration(figures.seconds)}, {sum(line.trained for line in lines):,} trained tokens")
    states = Text(" ").join(Text.assemble(_chip(state, order), f" {count:,} ") for state, count in visits.items())
    endings: dict[str, int] = {}
    for line in lines:
        endings[line.ending] = endings.get(line.ending, 0) + 1
    ended = Text("ended: " + ", ".join(f"{visible(name)} {count:,}" for name, count in endings.items()))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("slowest", "stop reason", "score", "turns", "trained", "calls", "time", "what it went into"):
        table.add_column(name, justify="right" if name in ("score", "turns", "trained", "calls", "time") else "left")
    for line in sorted(lines, key=lambda line: -line.wall)[:ROWS]:
        calls = f"{line.calls}" + (f" ({line.failures} failed)" if line.failures else "")
        cells = (visible(line.trajectory_id), visible(line.ending), number(line.score), str(line.generations))
        rest = (f"{line.trained:,}", calls, duration(line.wall), visible(line.why()))
        table.add_row(*(Text(cell) for cell in (*cells, *rest)))
    parts: list[RenderableType] = [*_notes(run.notes), head]
    return Group(*parts, states, ended, table) if lines else Group(*parts, Text("it has no trajectories"))


def trajectory_view(run: RecordedRun, trajectory_id: str) -> RenderableType:
    """Return what one trajectory did: its path, and its tokens, those that are trained underlined.

    Raises:
        ConfigError: the run has no such trajectory.
    """
    recorded = run.trajectory(trajectory_id)
    trajectory = recorded.trajectory
    graph = run.agents.get(trajectory.agent)
    order = [*(graph.states if graph else ()), *recorded.state_names]
    texts = [_Texts(stream, run.texts(stream.engine)) for stream in trajectory.streams]
    head = Text.assemble(
        (f"{visible(trajectory.trajectory_id)} ", "bold"),
        f"of {visible(trajectory.agent)}: ",
        (visible(trajectory.stop_reason or "unfinished"), "bold"),
        f", score {number(trajectory.score)}, {trajectory.turn} generations, "
        f"{trajectory.trained_tokens:,} of {trajectory.response_tokens:,} tokens trained",
    )
    found = stretches(recorded.events)
    totals = ", ".join(
        f"{kind} {duration(covered([s for s in found if s.kind == kind]))}"
        for kind in KINDS
        if any(s.kind == kind for s in found)
    )
    path = Text(" → ").join(_chip(stay.state, order) for stay in stays(recorded.events))
    parts: list[RenderableType] = [*_notes(run.notes), head, Text(visible(ending_of(recorded))), path]
    if totals:
        parts.append(Text(totals, style="dim"))
    for card in cards(recorded):
        parts += _card(card, recorded, order, texts)
    return Group(*parts)


def _card(card: Card, recorded: Recorded, order: Sequence[str], texts: Sequence[_Texts]) -> list[RenderableType]:
    if isinstance(card.step, Transitioned):
        return []
    if card.pause is not None:
        return [Text(f"\n{visible(card.pause)}", style="dim italic")]
    title = Text.assemble("\n", _chip(card.state, order), (f" {visible(describe(card))}", "bold"))
    title.append(
        f"  {card.end - card.start:,} tokens" if card.kind != "pending" else "  never entered the tokens", "dim"
    )
    if card.generated is not None:
        title.append(f", turn {card.turn}, {duration(card.generated.seconds)}", "dim")
    for value, _ in card.scores:
        title.append(f"  score {number(value)}", "green")
    if card.guarded:
        title.append(f"  {card.guarded} markers kept as text", "yellow")
    shown: list[RenderableType] = [title]
    if card.kind == "pending":
        shown += [Text(_cut(visible(str(message.get("content") or "")))) for message in card.messages]
    else:
        shown.append(_ribbon(card, recorded, texts[card.stream]))
    for call in card.calls:
        said = Text(f"  {visible(call.name)}({_cut(visible(str(call.arguments)))}) → ", style="dim")
        if call.called is None:
            said.append("never carried out", "red")
        elif call.called.failure is not None:
            said.append(f"{visible(call.called.failure)}: {_cut(visible(call.called.result))}", "red")
        else:
            said.append(_cut(visible(call.called.result)))
        shown.append(said)
    return shown


def _ribbon(card: Card, recorded: Recorded, texts: _Texts) -> Text:
    stream = recorded.trajectory.streams[card.stream]
    ids = stream.tokens.ids[card.start : card.end]
    logprobs = stream.tokens.response_logprobs()[max(0, card.start - stream.tokens.prompt_length) :]
    trained = card.kind == "model" and stream.tokens.trained
    ribbon = Text()
    half = TOKENS_SHOWN // 2
    for place, id_ in enumerate(ids):
        if half <= place < len(ids) - half:
            if place == half:
                ribbon.append(f" … {len(ids) - 2 * half:,} more tokens … ", "dim italic")
            continue
        style = "underline" if trained else ""
        if card.kind == "model":
            surprise = -float(logprobs[place])
            style += " red" if surprise > 3 else " yellow" if surprise > 1 else ""
        elif id_ in texts.markers:
            style = "dim"
        ribbon.append(texts.at(card.start + place, id_), style.strip())
    ribbon.rstrip()
    return ribbon


def _chip(state: str, order: Sequence[str]) -> Text:
    try:
        style: Any = f"bold {colour_of(state, order).dark.line}"
    except ValueError:  # a state of a graph that could not be read
        style = "bold"
    return Text(visible(state), style=style)


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [Text(visible(note), style="yellow") for note in notes]


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN // 2]} … {text[-TEXT_SHOWN // 2 :]}"
