"""Which local folder a model's name stands for, also one that a journal names; its tokenizer, and its small files.

Invariant: nothing here runs code that lies in a model's folder, and a tokenizer without code of its own is loaded
without torch, which what else transformers loads imports. What a folder's files do not say is ``None`` or empty, never
guessed. What is in the hub's cache costs no look at the network, so a branch means the commit that the cache has for it
until somebody downloads another. A folder of the hub that is returned is complete: it has a ``config.json`` and, where
weights are wanted, each file of them that its index names. Cache, token, endpoint and offline mode are those of
``huggingface_hub``'s own variables (``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.chat.hosted import hosted_tokenizer
from fsm_rollout.errors import EngineError, close_match, did_you_mean
from fsm_rollout.model import CHECKPOINTS, embedded_model
from fsm_rollout.trajectory.journal import metadata

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # organisation/name
INDEX = "model.safetensors.index.json"
# What describes a model and its tokenizer; no code, which nothing here runs, and no other framework's weights.
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHTS = "*.safetensors"
REPLAYS = 100  # a journal whose engine was a replay leads to another journal, so many times at most
PILLOW_ONLY = (4, 5)  # Pillow's box and Hamming filters, which torchvision names and torch does not have
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # two names of one class in transformers 5
# What transformers reads tokenizers of GGUF files with; it imports torch.
_GGUF = "transformers.modeling_gguf_pytorch_utils"
# transformers' names come from a module that is made while it is imported: two threads at once do not find them all.
_importing = threading.Lock()


def model_folder(
    model: str | Path, base: str | Path = ".", *, revision: str | None = None, weights: bool = True
) -> Path:
    """Return the folder that ``model`` names, downloaded from the hub if it has to be.

    ``model`` is ``embedded``, ``embedded:early``, a path (relative to ``base``) or, where there is no such folder, a
    name of the hub: ``organisation/name``, of which ``revision`` is a branch, tag or commit. ``weights``: whether the
    model's weights are wanted, or only what describes it.

    Raises:
        EngineError: there is no such checkpoint, folder or model, or it holds no model, or cannot be downloaded.
    """
    folder = local_folder(model, base, revision=revision)
    if folder is not None:
        return folder
    try:
        return hub_folder(str(model), revision, weights=weights)
    except EngineError as error:
        raise EngineError(f"{error} (nor is there a folder '{Path(base) / str(model)}')") from error.__cause__


def local_folder(model: str | Path, base: str | Path = ".", *, revision: str | None = None) -> Path | None:
    """Return the folder that ``model`` names, or ``None`` for a name of the hub, without a look at it or its cache.

    Raises:
        EngineError: it can be neither; or ``revision`` was given for a folder.
    """
    name, _, checkpoint = str(model).partition(":")
    if name == EMBEDDED:
        checkpoint = checkpoint or CHECKPOINTS[0]
        if checkpoint not in CHECKPOINTS:
            raise EngineError(
                f"embedded checkpoint '{checkpoint}' does not exist{did_you_mean(checkpoint, CHECKPOINTS)}"
            )
        folder = embedded_model(checkpoint)
    else:
        folder = Path(base) / Path(model).expanduser()
    if not folder.is_dir():
        if isinstance(model, str) and is_hub_name(model):
            return None
        raise EngineError(
            f"model '{model}': there is no folder '{folder}'{close_match(name, [EMBEDDED])}; give the path of a model, "
            f"a name of the hub (organisation/name), or '{EMBEDDED}'"
        )
    if not (folder / "config.json").is_file():
        raise EngineError(f"model '{model}': '{folder}' has no config.json; give a folder that save_pretrained wrote")
    if revision is not None:
        raise EngineError(
            f"model '{model}' is the folder '{folder}', so it has no revision '{revision}'; leave that out"
        )
    return folder


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder; EngineError if transformers cannot load it."""
    try:
        if _is_plain(folder):
            return plain_tokenizers().from_pretrained(folder, local_files_only=True)
        with _importing:
            from transformers import AutoTokenizer  # imports every kind of model there is, and torch's compiler

        # Said out loud: where nothing is said, transformers asks on the terminal whether to run the folder's code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes transformers or tokenizers raise
        raise EngineError(f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {error}") from error


def load_processor(folder: Path) -> Any:
    """Return the processor of a model that sees pictures, ``None`` for one that does not.

    Where the model counts positions in its own way, the processor has its ``get_rope_index``, as verl's have.

    One that cannot be loaded, because packages are missing, is logged: its model then reads text only.
    """
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        return None
    try:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(getattr(processor, "image_processor", None), "resample", None) in PILLOW_ONLY:
            pillow: dict[str, Any] = {"backend": "pil", "local_files_only": True, "trust_remote_code": False}
            processor = AutoProcessor.from_pretrained(folder, **pillow)
        if (counts := rope_index(folder)) is not None and processor is not None:
            processor.get_rope_index = counts  # where verl's processors have it, too
    except Exception as error:  # whatever a missing package or a broken file makes transformers raise
        why = " ".join(str(error).split())[:300]
        logger.warning("the model in '%s' reads text only: its processor cannot be loaded (%s)", folder, why)
        return None
    return processor if getattr(processor, "image_processor", None) is not None else None


def plain_tokenizers() -> Any:
    """Return transformers' class of tokenizers without code of their own, and leave torch unloaded.

    Its module imports torch, two seconds and 170 MB, only to read GGUF files: that waits until one is read.
    """
    stand_in = ModuleType(_GGUF)
    vars(stand_in)["__getattr__"] = lambda name: (
        lambda *arguments, **keywords: getattr(import_module(_GGUF), name)(*arguments, **keywords)
    )
    with _importing:
        needed = "torch" not in sys.modules and _GGUF not in sys.modules
        if needed:
            sys.modules[_GGUF] = stand_in
        try:
            from transformers import PreTrainedTokenizerFast
        finally:
            if needed:
                del sys.modules[_GGUF]
    return PreTrainedTokenizerFast


def stop_tokens(*candidates: int | Sequence[int] | None) -> frozenset[int]:
    """Return the stop tokens of the first candidate that names any: configs have one id there, or several."""
    for eos in candidates:
        if eos is not None:
            return frozenset({int(eos)}) if isinstance(eos, int) else frozenset(map(int, eos))
    return frozenset()


def _is_plain(folder: Path) -> bool:
    """Say whether the folder asks for the class that every fast tokenizer without code of its own has."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):  # for transformers to judge
        return False
    return isinstance(config, dict) and config.get("tokenizer_class") in PLAIN and "auto_map" not in config


class RecordedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says of an engine (``Rollout.description``)."""

    base: str = "."  # the folder to which its paths are relative
    kind: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None  # of the model or tokenizer, where it is one of the hub
    run: str | None = None  # of a replay: the run that it replayed
    engine: str = POLICY  # of a replay: which of that run's engines
    max_context: int | None = None
    eos_ids: list[int] = []


def recorded_engine(run: Mapping[str, Any], engine: str) -> RecordedEngine:
    """Return how a run's journal describes one of its engines.

    ``run`` is the journal's metadata. An engine that was a replay is described by the journal that it replayed.

    Raises:
        EngineError: the journal does not describe that engine, or not in the form that a run gives.
        JournalError: the engine was a replay of a journal that can no longer be read.
    """
    for _ in range(REPLAYS):
        engines = run.get("engines") or {}
        if engine not in engines:
            raise EngineError(f"its journal says nothing of an engine '{engine}'{did_you_mean(engine, engines)}")
        try:
            facts = msgspec.convert({**engines[engine], "base": run.get("base") or "."}, RecordedEngine)
        except (msgspec.ValidationError, TypeError) as error:
            raise EngineError(f"what its journal says of engine '{engine}' cannot be used: {error}") from error
        if facts.kind != "replay" or facts.run is None:
            return facts
        replayed = Path(facts.base) / facts.run
        run, engine = metadata(replayed), facts.engine
    raise EngineError(f"its journal says that engine '{engine}' is the replay of a replay, more than {REPLAYS} times")


def recorded_tokenizer(facts: RecordedEngine) -> Any:
    """Return a recorded engine's tokenizer; EngineError if it is not on this machine."""
    tokenizer = load_tokenizer(_recorded_folder(facts))
    return hosted_tokenizer(tokenizer) if facts.kind == "chat" else tokenizer


def recorded_processor(facts: RecordedEngine) -> Any:
    """Return a recorded engine's processor, ``None`` where its model sees none; EngineError as for the tokenizer."""
    return None if facts.kind == "chat" else load_processor(_recorded_folder(facts))


def _recorded_folder(facts: RecordedEngine) -> Path:
    try:
        name = facts.tokenizer or (facts.kind != "chat" and facts.model) or EMBEDDED
        return model_folder(name, facts.base, revision=facts.revision, weights=False)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise EngineError(f"its tokenizer cannot be found: {error}") from error


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise EngineError(f"'{path}' is not JSON: {error}") from None
    return config if isinstance(config, Mapping) else {}


def text_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of the language model, which one that sees images nests; EngineError if it is broken."""
    config = _config(folder / "config.json")
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def config_number(folder: Path, key: str) -> int | None:
    """Return a number of the config (``vocab_size``, say); EngineError if a file of the folder is broken."""
    number = text_config(folder).get(key)
    return number if isinstance(number, int) else None


def stop_tokens_in(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the stop tokens of the generation config, else the config's, else the tokenizer's.

    Raises:
        EngineError: a file of the folder is broken.
    """
    of_generation = _config(folder / "generation_config.json").get("eos_token_id")
    return stop_tokens(of_generation, text_config(folder).get("eos_token_id"), tokenizer.eos_token_id)


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


def _positions(config: Any, model_class: type[Any], **inputs: Any) -> Any:
    """Return the positions ``[3, rows, tokens]``, and how far each row's are off those of text."""
    model: Any = object.__new__(model_class)  # no weight is made or read
    vars(model)["config"] = config  # all that the method reads of a model
    return model.get_rope_index(**inputs)


def rope_index(folder: Path) -> Callable[..., Any] | None:
    """Return how a model counts positions where pictures stand, by its own class; ``None``: as those of text."""
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model_class = MODEL_MAPPING.get(type(config), None)
    return partial(_positions, config, model_class) if hasattr(model_class, "get_rope_index") else None
