"""A run or a trajectory in the terminal: compact, in the colours of the pages.

Invariant: text from a model or a tool is only ever printed as text: no markup, no control sequence gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fsm_rollout.diagrams.palette import colour_of
from fsm_rollout.report.cards import Card, cards
from fsm_rollout.report.endings import kind_of_end
from fsm_rollout.report.figures import Figures, Line
from fsm_rollout.report.moments import KINDS, covered, stays, stretches
from fsm_rollout.report.pages import duration, number
from fsm_rollout.report.recorded import Recorded, RecordedRun
from fsm_rollout.report.token_texts import TokenTexts, shortened, visible
from fsm_rollout.report.trajectory import describe, ending_of
from fsm_rollout.trajectory.events import Transitioned
from fsm_rollout.trajectory.trajectory import Stream

ROWS = 20
WIDE = 120
"""Columns of a terminal in which a table of all there is to say can be read."""
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
        for state, count in recorded.trajectory.visits.items() if recorded.trajectory.parent_id is None else ():
            visits[state] = visits.get(state, 0) + count
    own, called = figures.own, figures.called
    order = [state for graph in run.agents.values() for state in graph.states]
    groups = len({line.group_id for line in own})
    head = Text(f"{run.folder}: {len(own):,} {'trajectory' if len(own) == 1 else 'trajectories'} in ")
    head.append(f"{groups:,} {'group' if groups == 1 else 'groups'}")
    head.append(f" + {len(called):,} of sub-agents" if called else "")
    trained = sum(line.trained for line in figures.lines)
    head.append(f", {duration(figures.seconds)}, {trained:,} trained tokens{' in all' if called else ''}")
    states = Text(" ").join(Text.assemble(_chip(state, order), f" {count:,} ") for state, count in visits.items())
    parts: list[RenderableType] = [*_notes(run.notes), head]
    if not figures.lines:
        return Group(*parts, Text("it has no trajectories"))
    parts += [states, Text.assemble("ended: ", _endings(own))]
    if called:
        parts.append(Text.assemble("of sub-agents: ", _endings(called)))
    return Group(*parts, _Slowest(sorted(figures.lines, key=lambda line: -line.wall)[:ROWS]))


def _endings(lines: Sequence[Line]) -> Text:
    counts = Counter(line.ending for line in lines)
    return Text(", ").join(Text.assemble(_ending(name), f" {count:,}") for name, count in counts.most_common())


def _ending(reason: str) -> Text:
    return Text(visible(reason), style="red" if kind_of_end(reason) == "cut" else "")


class _Slowest:
    """The table of the slowest: what their time went into has a column where there is room, else lines of its own.

    No column cuts what stands in it: what is too long for its column goes on below.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        columns = ["slowest", "stop reason", "score", "turns", "trained", "calls", "time"]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in [*columns, *(["what it went into"] if wide else [])]:
            number_like = name in columns[2:]
            table.add_column(
                name, justify="right" if number_like else "left", no_wrap=number_like, overflow="fold", min_width=4
            )
        for line in self.lines:
            calls = f"{line.calls}" + (f" ({line.failures} failed)" if line.failures else "")
            of = "" if line.parent_id is None else "↳ "  # a sub-agent
            rest = (number(line.score), str(line.generations), f"{line.trained:,}", calls, duration(line.wall))
            cells = [Text(of + visible(line.trajectory_id)), _ending(line.ending), *map(Text, rest)]
            table.add_row(*cells, *([Text(visible(line.why()))] if wide else []))
        yield table
        if not wide:
            yield Text("what it went into:", style="dim")
            for line in self.lines:
                yield Text.assemble(f"  {visible(line.trajectory_id)}: ", (visible(line.why()), "dim"))


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
    parts: list[RenderableType] = [*_notes(run.notes), head, Text(shortened(visible(ending_of(recorded)))), path]
    if totals:
        parts.append(Text(totals, style="dim"))
    for card in cards(recorded):
        parts += _card(card, recorded, order, texts)
    return Group(*parts)


def _card(card: Card, recorded: Recorded, order: Sequence[str], texts: Sequence[_Texts]) -> list[RenderableType]:
    if isinstance(card.step, Transitioned):
        return []
    if card.pause is not None:
        return [Text(f"\n{shortened(visible(card.pause))}", style="dim italic")]
    title = Text.assemble("\n", _chip(card.state, order), (f" {visible(describe(card))}", "bold"))
    title.append(
        f"  {card.end - card.start:,} tokens" if card.kind != "pending" else "  never entered the tokens", "dim"
    )
    if card.generated is not None:
        title.append(f", turn {card.turn}, {duration(card.generated.seconds)}", "dim")
    if card.cut is not None:
        title.append(f"  {visible(card.cut)}", "red")
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
