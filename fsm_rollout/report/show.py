"""``fsm-rollout show``: a run or a trajectory as a page, as a timeline, or in the terminal in the colours of the pages.

Invariant: text from a model or a tool is only ever printed as text: no markup, no control sequence gets through.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.table import score_with_error
from fsm_rollout.diagrams.palette import colour_of
from fsm_rollout.errors import ConfigError, JournalError
from fsm_rollout.report.cards import Card, cards
from fsm_rollout.report.figures import Figures, Line, counted
from fsm_rollout.report.folding import folded_repeats
from fsm_rollout.report.pages import Links, write_page
from fsm_rollout.report.pictures import line_of, text_with_pictures
from fsm_rollout.report.recording import Recording, RunFolder, kind_of_end, open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.spans import parts_of
from fsm_rollout.report.texts import GOES_ON, TokenTexts, duration, number, shortened, visible
from fsm_rollout.report.trace import trace
from fsm_rollout.report.trajectory import ending_of, page_of_run
from fsm_rollout.trajectory.trajectory import Trajectory

ROWS = 20
WIDE = 120  # columns of a terminal in which a table of all there is to say can be read
TOKENS_SHOWN = 160  # tokens of one card; the first half and the last
TEXT_SHOWN = 200


def show(folder: Path, trajectory_id: str | None = None, out: Path | None = None) -> RenderableType | None:
    """Write the view that ``out`` names, or return the one for the terminal.

    Raises:
        ConfigError: not a run's folder, no such trajectory, an output of another kind, a journal that cannot be read
            or a file that cannot be written.
    """
    if out is not None and not out.name.endswith((".html", ".trace.json")):
        raise ConfigError(
            f"-o {out}: its name says what to write; "
            "give F.html (a page) or F.trace.json (a timeline for ui.perfetto.dev)"
        )
    try:
        run = open_run(folder)
        if out is None:
            return run_view(run) if trajectory_id is None else trajectory_view(run, trajectory_id)
        if out.name.endswith(".trace.json"):
            recordings = run.recordings() if trajectory_id is None else [run.recording(trajectory_id)]
            write_page(out, json.dumps(trace(recordings), separators=(",", ":")))
        elif trajectory_id is None:
            write_report(folder, out)
        else:
            write_page(out, page_of_run(run, trajectory_id, Links(run.folder, out)))
    except JournalError as error:
        raise ConfigError(str(error)) from error
    return None


def run_view(run: RunFolder) -> RenderableType:
    """Return what a run came to, and its slowest trajectories."""
    figures, visits = Figures(), Counter[str]()
    for recording in run.recordings():
        figures.add(recording)
    for line in figures.own:
        visits.update(line.visits)
    samples, called, groups = figures.own, figures.called, len({line.group_id for line in figures.own})
    trained, again = sum(line.trained for line in figures.counted), len(figures.lines) - len(figures.counted)
    head = Text(f"{run.folder}: {len(samples):,} {'trajectory' if len(samples) == 1 else 'trajectories'} in ")
    head.append(f"{groups:,} {'group' if groups == 1 else 'groups'}")
    head.append(f" + {len(called):,} of sub-agents" if called else "")
    head.append(f", {duration(figures.seconds)}, {trained:,} trained tokens{' in all' if called else ''}")
    head.append(f"; {again:,} given up, in whose place others began" if again else "")
    parts: list[RenderableType] = [*_notes(run.notes), head]
    if not figures.lines:
        return Group(*parts, Text("it has no trajectories"))
    order = [state for graph in run.agents.values() for state in graph.states]
    parts.append(Text(" ").join(Text.assemble(_chip(name, order), f" {count:,} ") for name, count in visits.items()))
    parts.append(Text.assemble("ended: ", _endings(samples)))
    if called:
        parts.append(Text.assemble("of sub-agents: ", _endings(called)))
    scores = [SampleScore(line.group_id, line.sample, line.score) for line in samples]
    if scored := sum(line.score is not None for line in samples):
        of_all = "" if scored == len(samples) else f" (scored {scored:,} of {len(samples):,})"
        parts.append(Text(f"score: {score_with_error(scores)}{of_all}"))
    if given := [line.tool_rewards for line in samples if line.tool_rewards]:
        mean = number(sum(map(sum, given)) / len(given))
        parts.append(Text(f"tool rewards: {mean} per trajectory that was given any; {sum(map(len, given)):,} in all"))
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
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("slowest", "stop reason", "score", "generations", "trained", "calls", "time", "what it went into"):
            words = name in ("slowest", "stop reason", "what it went into")
            if wide or name != "what it went into":
                justify: Literal["left", "right"] = "left" if words else "right"
                table.add_column(name, justify=justify, no_wrap=not words, overflow="fold", min_width=4)
        for line in self.lines:
            calls = f"{line.calls}" + (f" ({line.failures} failed)" if line.failures else "")
            sub_agent = "" if line.parent_id is None else "↳ "
            numbers = (number(line.score), str(line.generations), f"{line.trained:,}", calls, duration(line.wall))
            cells = [Text(sub_agent + visible(line.trajectory_id)), _ending(line.ending), *map(Text, numbers)]
            table.add_row(*cells, *([Text(visible(line.why()))] if wide else []))
        yield table
        if not wide:
            yield Text("what it went into:", style="dim")
            for line in self.lines:
                yield Text.assemble(f"  {visible(line.trajectory_id)}: ", (visible(line.why()), "dim"))


def trajectory_view(run: RunFolder, trajectory_id: str) -> RenderableType:
    """Return what one trajectory did: its path, and its tokens, trained ones underlined; ConfigError: no such id."""
    recording = run.recording(trajectory_id)
    trajectory = recording.trajectory
    graph = run.agents.get(trajectory.agent)
    order = [*(graph.states if graph else ()), *recording.state_names]
    texts = {stream.engine: run.texts(stream.engine) for stream in trajectory.streams}
    head = Text.assemble(
        (f"{visible(trajectory.trajectory_id)} ", "bold"),
        f"of {visible(trajectory.agent)}: ",
        (visible(trajectory.stop_reason or "unfinished"), "bold"),
        f", score {number(trajectory.score)}{_parts(trajectory)}, {counted(trajectory.generations, 'generation')}, "
        f"{trajectory.trained_tokens:,} of {trajectory.response_tokens:,} tokens trained"
        + ("" if trajectory.cost is None else f", cost {number(trajectory.cost, 2)}"),
    )
    path = Text(" → ").join(
        _repeated(Text(" → ").join(_chip(state, order) for state in block.items), block.times)
        for block in folded_repeats([visit.state for visit in recording.intervals("visit")])
    )
    parts: list[RenderableType] = [*_notes(run.notes), head, Text(shortened(visible(ending_of(recording)))), path]
    took = parts_of(trajectory) | {"other": 0.0, "away": trajectory.suspended_seconds}
    if spent := [f"{kind} {duration(seconds)}" for kind, seconds in took.items() if seconds > 0]:
        parts.append(Text(", ".join(spent), style="dim"))
    spread = [
        token_texts.spread(stream.tokens) if (token_texts := texts[stream.engine]) is not None else {}
        for stream in trajectory.streams
    ]
    for card in cards(recording):
        if card.pause is not None:
            parts.append(Text(f"\n{shortened(visible(card.pause))}", style="dim italic"))
        elif card.step is None:
            parts += _card(card, recording, order, texts, spread)
    return Group(*parts)


def _parts(trajectory: Trajectory) -> str:
    """Return what its reward measured, and what its tools gave, behind its score."""
    parts = [
        f"{name} {part if isinstance(part, str) else number(part)}" for name, part in trajectory.reward_parts.items()
    ]
    if trajectory.tool_rewards:
        parts.append(f"tool rewards {', '.join(map(number, trajectory.tool_rewards))}")
    return f" ({visible('; '.join(parts))})" if parts else ""


def _repeated(states: Text, times: int) -> Text:
    return states if times == 1 else Text.assemble("(", states, f") ×{times:,}")


def _card(
    card: Card,
    recording: Recording,
    order: Sequence[str],
    texts: Mapping[str, TokenTexts | None],
    spread: Sequence[Mapping[int, str]],
) -> list[RenderableType]:
    # 1. Its title: who, how much, what cut it, what it scored.
    pending = card.kind == "pending"
    title = Text.assemble("\n", _chip(card.state, order), (f" {visible(card.who)}", "bold"))
    title.append("  never entered the tokens" if pending else f"  {card.end - card.start:,} tokens", "dim")
    if card.generated is not None:
        title.append(f", generation {card.turn}, {duration(card.generated.seconds)}", "dim")
    if card.cut is not None:
        title.append(f"  {visible(card.cut)}", "red")
    for value, _ in card.scores:
        title.append(f"  score {number(value)}", "green")
    if card.abandoned:
        title.append("  abandoned: more was said before the first generation", "yellow")
    if card.guarded:
        title.append(f"  {card.guarded} markers kept as text", "yellow")
    # 2. Its tokens, or the messages that have none.
    messages = [Text(_cut(visible(text_with_pictures(message)))) for message in card.messages]
    shown: list[RenderableType] = [title, *(messages if pending else [_ribbon(card, recording, texts, spread)])]
    # 3. Its calls, and what became of them.
    for call in card.calls:
        line = Text(f"  {visible(call.name)}({_cut(visible(str(call.arguments)))}) → ", style="dim")
        if call.called is None:
            line.append("never carried out", "red")
        elif call.called.failure is not None:
            line.append(f"{visible(call.called.failure)}: {_cut(visible(call.called.result))}", "red")
        else:
            line.append(_cut(visible(call.called.result)))
        if call.called is not None and call.called.reward is not None:
            line.append(f"  reward {number(call.called.reward)}", "green")
        shown.append(line)
    return shown


def _ribbon(
    card: Card, recording: Recording, texts: Mapping[str, TokenTexts | None], spread: Sequence[Mapping[int, str]]
) -> Text:
    stream = recording.trajectory.streams[card.stream]
    tokens, token_texts = stream.tokens, texts[stream.engine]
    ids = tokens.ids[card.start : card.end]
    logprobs = tokens.response_logprobs()[max(0, card.start - tokens.prompt_length) :]
    vocabulary = token_texts.vocabulary(ids) if token_texts else {}
    pictures = {span.start - card.start: span for span in stream.media}
    inside = {at for start, span in pictures.items() for at in range(start + 1, start + span.length)}
    places = [place for place in range(len(ids)) if place not in inside]  # a picture is one thing
    ribbon, half = Text(), TOKENS_SHOWN // 2
    for number_of, place in enumerate(places):
        if half <= number_of < len(places) - half:
            if number_of == half:
                ribbon.append(f" … {places[-half] - place:,} more tokens … ", "dim italic")
            continue
        if (span := pictures.get(place)) is not None:
            ribbon.append(line_of(span.picture, [span.length]), "cyan")
            continue
        id_ = ids[place]
        style = "underline" if card.kind == "model" and tokens.trained else ""
        if card.kind == "model":
            surprise = -float(logprobs[place])
            style += " red" if surprise > 3 else " yellow" if surprise > 1 else ""
        elif token_texts is not None and id_ in token_texts.markers:
            style = "dim"
        text = spread[card.stream].get(card.start + place, vocabulary.get(id_, ""))
        if text == GOES_ON:  # its character stands there already
            continue
        ribbon.append(visible(text) if token_texts else f"{id_} ", style.strip())
    ribbon.rstrip()
    return ribbon


def _chip(state: str, order: Sequence[str]) -> Text:
    try:
        return Text(visible(state), style=f"bold {colour_of(state, order).dark.line}")
    except ValueError:  # a state of a graph that could not be read
        return Text(visible(state), style="bold")


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [Text(visible(note), style="yellow") for note in notes]


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN // 2]} … {text[-TEXT_SHOWN // 2 :]}"
