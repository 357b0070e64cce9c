"""What every run checks before a process starts."""

from __future__ import annotations

from conversion.cache import open_cache
from mrl import env
from mrl.config.checks import check_config
from mrl.config.hub import model_folder
from mrl.config.model import use_local_folders
from mrl.config.schema import RunConfig


def check_start(config: RunConfig) -> None:
    """Returns if config, model and cache are in order; names of the Hub in `config` have become folders then.

    Raises:
        ValueError: naming every key or file at fault, the rule, and the way out.
    """
    model = config.policy.model_name
    use_local_folders(config)
    check_config(config)
    # A model of the Hub is downloaded once nothing else is wrong.
    model_folder(model)
    root = env.cache_root()
    if root is not None:
        open_cache(root)
