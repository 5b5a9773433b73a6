"""What ``fsm-rollout check`` says of a run's YAML.

Invariant: nothing is started: a function that gives the prompts is imported and not called, an engine's keys are read
and its model is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsm_rollout.engines.scripted.script import read_script
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.run_prompts import PromptSource
from fsm_rollout.jobs.runner import check_parts, load_agents, prompts_of
from fsm_rollout.names.objects import load_object


def check_run(file: Path) -> Iterator[str]:
    """Yield what a run's YAML, or each of its variants, is; ConfigError: something in it or in what it names is wrong.

    What it names are its agents, prompts, rewards, engines and the scripts of those.
    """
    variants = load_run(file).variants
    for name in variants or (None,):
        config = load_run(file, variant=name)
        # 1. What it names is there and sound.
        agents, source = load_agents(config), config.prompts
        if isinstance(source, PromptSource):
            load_object(source.use)
        prompts = [] if isinstance(source, PromptSource) else prompts_of(config)
        check_parts(config, prompts)
        for spec in config.specs.values():
            if isinstance(script := spec.get("script"), str):
                read_script(config.base / script)
        # 2. What it comes to.
        what = f"variant {name} of a run" if variants else "a run"
        many = f"{len(prompts):,} prompt{'s' * (len(prompts) > 1)}" if prompts else "the prompts that a function gives"
        yield f"{file}: {what} of {', '.join(agents)} on {many} (n={config.n}), by {config.engine['kind']}"
