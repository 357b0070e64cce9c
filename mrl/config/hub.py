"""Names of models on the Hugging Face Hub, and the local folders that hold them."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from conversion.files.hf_folder import weight_files

logger = logging.getLogger(__name__)

# Configuration and tokenizer.
_COMPANIONS = ["*.json", "*.model", "*.txt", "*.jinja"]


def is_hub_id(model: str) -> bool:
    """Whether `model` can only be an id of the Hub, `organisation/name`."""
    return not os.path.exists(model) and re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None


def is_prepared(path: str) -> bool:
    """Whether a path leads into what `python -m mrl.prepare tiny` makes."""
    return "prepared/tiny/" in f"{Path(path).as_posix()}/"


def cached_folder(model: str, *, with_weights: bool = True) -> Path | None:
    """The snapshot of a Hub id in the local cache; None if it is not there, or not all of it. Asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Whoever used only the tokenizer has no weights there: an error, or files that are not all there.
    with suppress(LocalEntryNotFoundError):
        found = Path(snapshot_download(model, allow_patterns=_patterns(with_weights), local_files_only=True))
        if _is_complete(found, with_weights):
            return found
    return None


def _patterns(with_weights: bool) -> list[str]:
    return [*_COMPANIONS, "*.safetensors"] if with_weights else _COMPANIONS


def model_folder(model: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: `model` itself, or the snapshot of a Hub id, from the local cache if it is there, else downloaded.

    What is neither a folder nor looks like an id (`organisation/name`) is returned as it is. Without weights only config and tokenizer
    are asked for.

    Raises:
        ValueError: neither is to be had.
    """
    if not is_hub_id(model):
        return Path(model)
    if (cached := cached_folder(model, with_weights=with_weights)) is not None:
        return cached
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    logger.info("%s is not in the local Hugging Face cache, or not all of it: downloading it", model)
    reason: Exception | str = "the Hub has no config.json of it, or not all of its safetensors files"
    try:
        found = Path(snapshot_download(model, allow_patterns=_patterns(with_weights)))
        # Without a network the hub library hands back what there is.
        if _is_complete(found, with_weights):
            return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = error
    raise ValueError(
        f"{model} is neither a folder nor complete in the local Hugging Face cache, and it cannot be downloaded: {reason}; "
        "name a folder, or download the model on a host with a network"
    )


def _is_complete(folder: Path, with_weights: bool) -> bool:
    try:
        weights = weight_files(folder) if with_weights else []
    except ValueError:
        return False
    return (folder / "config.json").exists() and all(path.exists() for path in weights)
