"""verl's own GRPO on agents of this project: writes GSM8K as verl reads it, and starts verl's trainer.

    python examples/verl/train.py                       # config.yaml: Qwen3-4B on eight GPUs
    python examples/verl/train.py model=… gpus=1 --print   # the whole configuration as verl has it, and no training

verl keeps its servers, weights and trainer; each sample is a trajectory of the config's agent. What decides between a
real run and a trial is the model and the number of GPUs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import verl
import yaml
from datasets import Dataset
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

HERE = Path(__file__).resolve().parent
NAME = "gsm8k"  # of the agent loop, which verl looks up by each row's `agent_name`
sys.path.insert(0, str(HERE.parent / "gsm8k"))


def write_data(folder: Path, limit: int | None = None) -> dict[str, str]:
    """Write both splits as verl reads them, and return their files."""
    from gsm8k import prompts

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, key in (("train", "data.train_files"), ("test", "data.val_files")):
        rows = [
            {
                "prompt": [dict(message) for message in prompt.messages],
                "agent_name": NAME,
                "data_source": "openai/gsm8k",
                "reward_model": {"style": "rule", "ground_truth": prompt.extra["answer"]},
                "extra_info": {"index": index, "split": split},
            }
            for index, prompt in enumerate(prompts(split, limit))
        ]
        files[key] = str(folder / f"{split}.parquet")
        Dataset.from_list(rows).to_parquet(files[key])
    return files


def verl_config(changes: list[str]) -> Any:
    """Return verl's own configuration with ours in it, which verl has found valid; a key that it lacks is an error."""
    config: Any = OmegaConf.merge(OmegaConf.load(HERE / "config.yaml"), OmegaConf.from_dotlist(changes))
    out = Path(config.out).resolve()
    given: dict[str, Any] = {str(key): value for key, value in config.verl.items()} | write_data(out)
    loop = {"name": NAME, "_target_": "fsm_rollout.adapters.verl_plug.FSMAgentLoop", "reward": config.reward}
    loops = out / "loops.yaml"
    loops.write_text(yaml.safe_dump([loop | {"agent": str((HERE / config.agent).resolve())}]), "utf-8")
    given |= {
        "actor_rollout_ref.model.path": config.model,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(loops),
        "trainer.n_gpus_per_node": config.gpus,
    }
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        whole = compose("ppo_trainer")
    for key, value in given.items():
        OmegaConf.update(whole, key, value)
    validate_config(config=whole, use_reference_policy=need_reference_policy(whole), use_critic=need_critic(whole))
    return whole


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, write the data, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help="changes of config.yaml: model=… gpus=…")
    parser.add_argument("--print", action="store_true", help="print verl's configuration, and do not train")
    asked = parser.parse_args(arguments)
    config = verl_config(asked.changes)
    if asked.print:
        print(OmegaConf.to_yaml(config))
        return
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    main()
