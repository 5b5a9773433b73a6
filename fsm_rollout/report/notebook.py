"""A trajectory's page in a notebook, with all that its rollout knows of it.

Invariant: the page shows what is at hand and says what is not. The rollout knows the tokens' texts and the agent's
graph; the path, the calls and the times are in its journal, if it keeps one. A trajectory alone (its own
``_repr_html_``) has its tokens as ids and its messages.

    from fsm_rollout.report.notebook import page

    page(rollout, "0/0")  # or a Trajectory; page(rollout, "0/0").save("trajectory.html")
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsm_rollout.errors import ConfigError, JournalError, did_you_mean
from fsm_rollout.report.pages import write_page
from fsm_rollout.report.recorded import Recorded, with_sub_agents
from fsm_rollout.report.token_texts import TokenTexts
from fsm_rollout.report.trajectory import framed, trajectory_page
from fsm_rollout.rollout import Rollout
from fsm_rollout.trajectory.journal import events, trajectory_ids
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Page:
    """One self-contained HTML page."""

    html: str

    def save(self, path: str | Path) -> Path:
        """Write the page to ``path`` and return that.

        Raises:
            OSError: the file cannot be written.
        """
        write_page(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        return framed(self.html)


def page(rollout: Rollout, trajectory: Trajectory | str) -> Page:
    """Return the page of one of a rollout's trajectories, or (by its id) of one in its journal, ended or not.

    Raises:
        ConfigError: an id, and the rollout keeps no journal or has no such trajectory; names the closest.
        JournalError: the journal cannot be read.
    """
    recorded = _recorded(rollout, trajectory)
    texts = {name: TokenTexts(engine.tokenizer) for name, engine in rollout.engines.items()}
    agents = {name: graph for one in rollout.agents.values() for name, graph in with_sub_agents(one).items()}
    graph = rollout.agents.get(recorded.trajectory.agent) or agents.get(recorded.trajectory.agent)
    return Page(trajectory_page(recorded, graph=graph, texts=texts.get))


def _recorded(rollout: Rollout, trajectory: Trajectory | str) -> Recorded:
    wanted = trajectory if isinstance(trajectory, str) else trajectory.trajectory_id
    if rollout.journal is None:
        if isinstance(trajectory, str):
            raise ConfigError(
                f"this rollout keeps no journal to find trajectory '{wanted}' in; "
                "give the trajectory itself, or Rollout(…, journal=Journal('journal.sqlite'))"
            )
        return Recorded(trajectory)
    with suppress(JournalError):  # closed: all of it is there already
        rollout.journal.flush()
    known = trajectory_ids(rollout.journal.path)
    if wanted in known:
        return Recorded.of(events(rollout.journal.path, wanted))
    if isinstance(trajectory, str):
        raise ConfigError(f"the journal has no trajectory '{wanted}'{did_you_mean(wanted, known)}")
    return Recorded(trajectory)
