"""What a notebook shows: an agent's picture, a trajectory's page, a batch's rows, what a model saw.

Invariant: data classes do not display themselves. An agent, a trajectory and a batch have no method for notebooks;
:func:`register` tells IPython how to show them as soon as ``fsm_rollout`` is imported there, and imports nothing that
draws before something is shown.

A page shows what is at hand and says what is not. A rollout knows the tokens' texts and the agent's graph; the path,
the calls and the times are in its journal, if it keeps one. A trajectory that is shown without its rollout has its
tokens as ids, and its messages.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.errors import ConfigError, JournalError, did_you_mean

if TYPE_CHECKING:
    from fsm_rollout.agent.graph import AgentGraph
    from fsm_rollout.batch.batch import TrajectoryBatch
    from fsm_rollout.engines.pool import EnginePool
    from fsm_rollout.report.recording import Recording
    from fsm_rollout.trajectory.journal import Journal
    from fsm_rollout.trajectory.pictures import StoredPicture
    from fsm_rollout.trajectory.trajectory import Trajectory


SHOWN_ROWS = 20  # of a batch
SHOWN_PICTURES = 12  # below a batch's table, which is kept in the notebook's file
SHOWN_BYTES = 4 * 2**20  # of them


def register(ipython: object) -> None:
    """Tell IPython's shell how agents and trajectories are shown; ``None`` (no shell is running) is told nothing.

    Where ipywidgets is missing, libraries' progress bars are lines of text, which nobody need be warned of.
    """
    if ipython is not None:
        warnings.filterwarnings("ignore", message="IProgress not found")
    formatters = getattr(getattr(ipython, "display_formatter", None), "formatters", {})
    for form, module, name, show in (
        ("image/svg+xml", "fsm_rollout.agent.graph", "AgentGraph", agent_picture),
        ("text/html", "fsm_rollout.trajectory.trajectory", "Trajectory", trajectory_frame),
        ("text/html", "fsm_rollout.batch.batch", "TrajectoryBatch", batch_table),
        ("text/html", "fsm_rollout.trajectory.pictures", "StoredPicture", picture_shown),
    ):
        if form in formatters:
            formatters[form].for_type_by_name(module, name, show)


def agent_picture(graph: AgentGraph) -> str | None:
    """Return an agent's picture as SVG; ``None`` where nothing is installed that draws, and IPython shows its text."""
    from fsm_rollout.diagrams.draw import DrawingError, to_svg

    try:
        return to_svg(graph)
    except DrawingError:
        return None


def picture_shown(picture: StoredPicture) -> str:
    """Return a picture as HTML, as large as it is where there is room."""
    return f'<img alt="picture {picture.sha256[:12]}" style="max-width:100%" src="{picture.data_uri()}">'


def trajectory_frame(trajectory: Trajectory) -> str:
    """Return the page of a trajectory of which nothing else is known, in a frame: its tokens are shown as ids."""
    from fsm_rollout.report.recording import Recording
    from fsm_rollout.report.trajectory import trajectory_page

    return framed(trajectory_page(Recording(trajectory)))


def batch_table(batch: TrajectoryBatch) -> str:
    """Return a batch's first rows as a table; ids link to the pages of a run that the batch was saved by."""
    from fsm_rollout.report.pages import Links, render_template
    from fsm_rollout.report.pictures import picture_data, pictures_in, words_of

    links = Links(batch.folder.parent, Path("notebook.ipynb")) if batch.folder is not None else None
    rows = batch.select(range(min(len(batch), SHOWN_ROWS))).rows()
    media = [span for row in rows for span in row.media]
    pictures = pictures_in([span.picture for span in media])
    numbers = {picture: number for number, picture in enumerate(pictures, 1)}
    data = picture_data(pictures[:SHOWN_PICTURES], SHOWN_BYTES)
    lines = [
        {
            "id": str(row.row_id if row.stream else row.trajectory_id),
            "page": links.to(row.trajectory_id) if links is not None else None,
            "score": None if row.score is None else f"{row.score:.3g}",
            "stop_reason": row.stop_reason,
            "context": row.context,
            "pictures": ", ".join(str(numbers[span.picture]) for span in row.media),
            "numbers": (row.num_turns, len(row.prompt_ids), len(row.response_ids), int(row.mask.sum())),
        }
        for row in rows
    ]
    shown = [
        (words_of(picture, (span.length for span in media if span.picture is picture)), data[picture.sha256])
        for picture in pictures
        if picture.sha256 in data
    ]
    facts = {
        "summary": repr(batch), "lines": lines, "more": len(batch) - len(rows), "pictures": shown,
        "unshown": len(pictures) - len(shown),
    }  # fmt: skip
    return render_template("batch.html.jinja", facts)


def framed(page: str) -> str:
    """Return a page as an ``<iframe>``, which keeps its styles and scripts apart from the notebook's."""
    frame = 'style="width:100%;height:80vh;border:1px solid #8886" sandbox="allow-scripts"'
    return f'<iframe {frame} srcdoc="{escape(page, quote=True)}"></iframe>'


@dataclass(frozen=True, slots=True)
class Page:
    """One self-contained HTML page."""

    html: str = field(repr=False)

    def __repr__(self) -> str:
        return f"<Page of {len(self.html):,} characters: .save('page.html') writes it, a notebook shows it>"

    def save(self, path: str | Path) -> Path:
        """Write the page to ``path`` and return that; ConfigError if it cannot be written."""
        from fsm_rollout.report.pages import write_page

        write_page(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        return framed(self.html)


def page(
    trajectory: Trajectory | str,
    *,
    engines: Mapping[str, EnginePool],
    agents: Mapping[str, AgentGraph],
    journal: Journal | None = None,
) -> Page:
    """Return the page of a trajectory, or (by its id) of one in ``journal``, ended or not.

    Args:
        trajectory: the trajectory, or its id.
        engines: the engines that sampled it, by name; their tokenizers give the tokens' texts.
        agents: the agents that it may be of, by name; their sub-agents are found in them.
        journal: where its events are kept, if they are.

    Raises:
        ConfigError: an id, and there is no journal or no such trajectory in it; names the closest.
        JournalError: the journal cannot be read.
    """
    from fsm_rollout.report.recording import by_name
    from fsm_rollout.report.texts import TokenTexts
    from fsm_rollout.report.trajectory import trajectory_page

    recording = _recording_of(trajectory, journal)
    texts = {name: TokenTexts(engine.facts.tokenizer) for name, engine in engines.items()}
    sub_agents = {name: graph for agent in agents.values() for name, graph in by_name(agent).items()}
    graph = agents.get(recording.trajectory.agent) or sub_agents.get(recording.trajectory.agent)
    return Page(trajectory_page(recording, graph=graph, texts=texts.get))


def _recording_of(trajectory: Trajectory | str, journal: Journal | None) -> Recording:
    from fsm_rollout.report.recording import Recording
    from fsm_rollout.trajectory.journal import events, trajectory_ids

    trajectory_id = trajectory if isinstance(trajectory, str) else trajectory.trajectory_id
    if journal is None:
        if isinstance(trajectory, str):
            raise ConfigError(
                f"this rollout keeps no journal to find trajectory '{trajectory_id}' in; "
                "give the trajectory itself, or Rollout(…, journal=Journal('journal.sqlite'))"
            )
        return Recording(trajectory)
    with suppress(JournalError):  # a closed journal has all of it on disk already
        journal.flush()
    journal_ids = trajectory_ids(journal.path)
    if trajectory_id in journal_ids:
        return Recording.of(events(journal.path, trajectory_id))
    if isinstance(trajectory, str):
        raise ConfigError(f"the journal has no trajectory '{trajectory_id}'{did_you_mean(trajectory_id, journal_ids)}")
    return Recording(trajectory)
