"""The resolved config as YAML, without secrets."""

from __future__ import annotations

import dataclasses
import re

from omegaconf import OmegaConf

from mrl.config.schema import RunConfig
from mrl.env import SECRET_NAME, secret_values

REDACTED = "<redacted>"
_URL_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s/:@]*):[^\s/@]+@")


def resolved_yaml(config: RunConfig) -> str:
    """The config with every value written out, as YAML that `load_config` reads; secrets are replaced by `<redacted>`."""
    plain = redact(dataclasses.asdict(config))
    assert isinstance(plain, dict)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def redact(value: object, key: str = "") -> object:
    """A copy of plain data in which text under a secret's key, secrets of the environment, and passwords in URLs are blanked out."""
    if isinstance(value, dict):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, key) for inner in value]
    return redact_text(REDACTED if SECRET_NAME.search(key) else value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """`text` without the values of secret environment variables and without passwords in URLs."""
    for secret in sorted(secret_values(), key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
