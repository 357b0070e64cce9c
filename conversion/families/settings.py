"""Reading of config.json: sizes with their rules, and the refusal of settings that change a model in a way we do not follow."""

from __future__ import annotations

from collections.abc import Mapping

HfConfig = Mapping[str, object]
"""The contents of a config.json."""


def positive_integer(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """A size; `default` where the key is missing or null.

    Raises:
        ValueError: it is anything but a positive integer.
    """
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a positive integer")
    return value


def positive_number(hf_config: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is missing or null.

    Raises:
        ValueError: it is anything else.
    """
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key}={value!r} must be a positive number")
    return float(value)


def choice(hf_config: HfConfig, key: str, *, default: bool) -> bool:
    """A true or false setting; `default` where the key is missing or null.

    Raises:
        ValueError: it is neither.
    """
    value = hf_config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r} must be true or false")
    return value


def check_settings(hf_config: HfConfig, supported: Mapping[str, tuple[object, ...]]) -> None:
    """Compares settings with the values that are supported; a key that is missing has the first of them.

    Raises:
        ValueError: another value; names the first one.
    """
    for key, values in supported.items():
        value = hf_config.get(key, values[0])
        if value not in values:
            raise ValueError(f"config.json: {key}={value!r} is not supported for {hf_config.get('model_type')}; only {values[0]!r} is")
