"""``fsm-rollout eval``: runs of a run's variants, each in a folder of its own, that may be gone on with at any time.

Invariant: an evaluation is a run like any other (``validate: true``), so all that reads runs reads it; what has been
finished under the same configuration is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fsm_rollout.agent.yaml.source import SourceMap, read_text, read_yaml
from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.jobs.run_config import RunConfig, load_run, run_of_agent
from fsm_rollout.jobs.runner import Progress, execute, resume
from fsm_rollout.jobs.summary import Summary
from fsm_rollout.trajectory.journal import JournalFolder, metadata
from fsm_rollout.trajectory.settings import Sampling


def evaluations(file: Path, overrides: Sequence[str]) -> list[RunConfig]:
    """Return the runs that a file stands for: a run's variants, the run itself where it has none, or an agent's.

    Their folder is the run's with `-eval` behind its name, unless an override says where.

    Raises:
        ConfigError: the file or an override is wrong.
    """
    text = read_text(file)
    if isinstance(text, Problem):
        raise ConfigError(text)
    data, _ = read_yaml(text, SourceMap(str(file)))
    if isinstance(data, dict) and {"states", "transitions"} <= data.keys():
        if not any(override.startswith("prompts") for override in overrides):
            raise ConfigError(Problem("is an agent's, which names no prompts; give them: --data FILE", str(file)))
        config = run_of_agent(file, overrides)
        configs = [config]
    else:
        config = load_run(file, overrides)
        configs = [load_run(file, overrides, variant=name) for name in config.variants] or [config]
    # Greedy samples are all alike, so several of a prompt are sampled as the agent says, unless the run says how.
    configs = [
        each.model_copy(update={"validation_sampling": Sampling()})
        if each.n > 1 and "validation_sampling" not in each.model_fields_set
        else each
        for each in configs
    ]
    if any(override.startswith("out=") for override in overrides):
        return configs
    folder = config.out.with_name(f"{config.out.name}-eval")
    return [each.model_copy(update={"out": folder / each.out.relative_to(config.out)}) for each in configs]


def evaluate(config: RunConfig, progress: Progress, *, replace: bool, say: Callable[[str], None]) -> Summary:
    """Carry out an evaluation, or what is left of it; errors as for ``run`` and ``resume``."""
    begun = JournalFolder(config.out).first.is_file() and metadata(config.out).get("run") == config.to_json()
    if replace or not begun:
        return execute(config, progress, replace=replace)
    return resume(config.out, [], progress, own=config, say=say)
