"""Lists of data sets under `data.train` and `data.validation`, which are sections here, get a name."""

from __future__ import annotations

from mrl.config.files import Settings


def name_dataset_lists(settings: Settings) -> None:
    """Moves a list at `data.train` or `data.validation` to the key `datasets` below, in place."""
    for key in (("data", "train"), ("data", "validation")):
        if key in settings and isinstance(settings[key].value, list):
            settings[(*key, "datasets")] = settings.pop(key)
