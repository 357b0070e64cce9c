"""Secrets of the environment and of configs, blanked out of everything that is written: saved configs, messages, log lines."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from omegaconf import OmegaConf

from mrl import env
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import REDACTED, noted_secrets
from mrl.config.texts import safe_text

_URL_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s/:@]*):[^\s/]+@")
_URL_TOKEN = re.compile(r"([?&][\w-]*(?:token|key|secret|password|signature|sig)=)[^&\s]+", re.IGNORECASE)


def resolved_yaml(config: RunConfig) -> str:
    """The config with every value written out, as YAML that `load_config` reads; secrets are replaced by `<redacted>`."""
    plain = redact(dataclasses.asdict(config))
    assert isinstance(plain, dict)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def redact(value: object, key: str = "") -> object:
    """A copy of plain data in which text under a secret's key, known secrets, and passwords in URLs are blanked out."""
    if isinstance(value, dict):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, key) for inner in value]
    return redact_text(REDACTED if env.SECRET_NAME.search(key) else value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """`text` without the values of secret environment variables, without secrets of configs, and without passwords in URLs."""
    for secret in sorted(env.secret_values() | noted_secrets(), key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _URL_TOKEN.sub(rf"\1{REDACTED}", _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text))


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that anybody may see, and those that nobody may."""
    hidden = {name: value for name, value in variables.items() if env.SECRET_NAME.search(name) or redact_text(value) != value}
    return {name: value for name, value in variables.items() if name not in hidden}, hidden


class SecretsFormatter(logging.Formatter):
    """Writes log lines and their tracebacks without secrets, and without what steers a terminal: errors quote rows."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return safe_text(redact_text(super().format(record)))


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(safe_text(redact_text("".join(traceback.format_exception(kind, error, trace)))))


def start_logging(text_format: str = "%(message)s", stream: TextIO | None = None) -> None:
    """Lets all loggers of this process write to `stream` (standard output, if not given) from INFO on, without secrets.

    The traceback of an error that ends the process has none either.
    """
    sys.excepthook = _print_uncaught
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(SecretsFormatter(text_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
