"""Write the embedded model with a window as long as coding agents' prompts, into the folder that is named.

It was trained on short dialogues: behind such a prompt it says nothing of use, and every token of it is exact.
"""

import json
import shutil
import sys
from pathlib import Path

from fsm_rollout.model import embedded_model


def write(folder: Path) -> None:
    """Write it into a folder that is not there yet."""
    shutil.copytree(embedded_model("final"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65_536}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
