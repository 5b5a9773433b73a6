"""Models that are named as on the Hugging Face hub: found in its cache, else downloaded into it.

Invariant: what is in the cache costs no look at the network, so a branch means the commit that the cache has for it
until somebody downloads another. A folder that is returned is complete: it has a ``config.json`` and, where weights
are wanted, each file of them that its index names. Cache, token, endpoint and offline mode are those of
``huggingface_hub``'s own variables (``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # organisation/name
INDEX = "model.safetensors.index.json"
# What describes a model and its tokenizer; no code, which nothing here runs, and no other framework's weights.
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHTS = "*.safetensors"


def is_hub_name(model: str) -> bool:
    """Say whether a model's name may be one of the hub: ``organisation/name``."""
    return HUB_NAME.fullmatch(model) is not None


def cached(model: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """Return the folder of a hub's model in the cache; ``None``: it is not there, or not all of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # Of its own check of what is missing, it asks for less than we do: files that nobody names.
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True, allow_patterns="config.json"))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / "config.json").is_file() and not (weights and _missing_weights(folder)) else None


def hub_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a hub's model, downloaded if it is not in the cache; ``weights``: with its weights.

    Raises:
        EngineError: it is neither in the cache nor can it be downloaded, with what to do; or it has no safetensors.
    """
    if (folder := cached(model, revision, weights=weights)) is not None:
        return folder
    from huggingface_hub import constants, errors, is_offline_mode, snapshot_download

    command = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    logger.info("downloading '%s' from %s into %s", model, constants.ENDPOINT, constants.HF_HUB_CACHE)
    try:
        patterns = [*SMALL, WEIGHTS] if weights else list(SMALL)
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except errors.RevisionNotFoundError:
        raise EngineError(
            f"model '{model}' has no revision '{revision}' on the hub; give a branch, tag or commit"
        ) from None
    except errors.GatedRepoError:
        raise EngineError(
            f"model '{model}' is gated: accept its terms at {constants.ENDPOINT}/{model}, then `hf auth login`, or set "
            f"HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise EngineError(
            f"the hub has no model '{model}', or not for you; is it misspelt? For a private one: `hf auth login`, or "
            f"set HF_TOKEN"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        unreachable = f"{constants.ENDPOINT} cannot be reached ({_reason(error)})"
        raise EngineError(
            f"model '{model}' is not in the cache {constants.HF_HUB_CACHE}, or not whole, and "
            f"{'HF_HUB_OFFLINE is set' if is_offline_mode() else unreachable}; where there is a network: `{command}`, "
            f"then copy that cache here, or set HF_HOME to it"
        ) from None
    except Exception as error:  # a full disk, a connection that breaks, an answer that is none
        raise EngineError(
            f"model '{model}' cannot be downloaded: {type(error).__name__}: {_reason(error)}; to try it alone: "
            f"`{command}`"
        ) from error
    if not (folder / "config.json").is_file():
        raise EngineError(f"model '{model}' of the hub has no config.json; name one that transformers can load")
    if weights and (missing := _missing_weights(folder)):
        raise EngineError(f"model '{model}' of the hub has no {missing}; convert it with save_pretrained")
    return folder


def _missing_weights(folder: Path) -> str | None:
    """Return what of a folder's weights is not there."""
    try:
        files = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
    except OSError:
        return None if any(folder.glob(WEIGHTS)) else WEIGHTS
    except (ValueError, LookupError, AttributeError, TypeError):
        return f"readable {INDEX}"
    return next((name for name in sorted(map(str, files)) if not (folder / name).is_file()), None)


def _reason(error: BaseException) -> str:
    """Return the first line of what lies at the bottom of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
