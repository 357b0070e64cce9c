"""Secrets of the environment and of configs, blanked out of everything that is written: saved configs, messages, log lines, tracebacks.

The secrets of a config are the values of keys that are called like a secret, and of environment variables that its expressions read.
`load_config` collects them in `RunConfig.secrets`, and in the set that the log handler of the entry blanks out.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TextIO

from mrl import env
from mrl.config.errors import REDACTED
from mrl.config.texts import safe_text

_URL_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s/:@]*):[^\s/]+@")
_URL_TOKEN = re.compile(r"([?&][\w-]*(?:token|key|secret|password|signature|sig)=)[^&\s]+", re.IGNORECASE)


def note_secrets(settings: Iterable[tuple[str, object]], secrets: set[str]) -> None:
    """Adds to `secrets` those of (name of a key, value as written)."""
    for name, value in settings:
        if isinstance(value, str) and env.SECRET_NAME.search(name) and "${" not in value:
            note_texts(value, secrets)


def note_texts(value: object, secrets: set[str]) -> None:
    """Adds a text, or all texts in lists and mappings, to `secrets`, unless they are too short to tell anything."""
    if isinstance(value, str) and len(value) >= env.MIN_SECRET_LENGTH:
        secrets.add(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            note_texts(inner, secrets)


def redact(value: object, secrets: AbstractSet[str] = frozenset(), key: str = "") -> object:
    """A copy of plain data in which text under a secret's key, `secrets`, and passwords in URLs are blanked out."""
    if isinstance(value, dict):
        return {name: redact(inner, secrets, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, secrets, key) for inner in value]
    return redact_text(REDACTED if env.SECRET_NAME.search(key) else value, secrets) if isinstance(value, str) else value


def redact_text(text: str, secrets: AbstractSet[str] = frozenset()) -> str:
    """`text` without `secrets`, the values of secret environment variables, and passwords in URLs."""
    for secret in sorted(env.secret_values() | secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _URL_TOKEN.sub(rf"\1{REDACTED}", _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text))


def split_secrets(variables: Mapping[str, str], secrets: AbstractSet[str] = frozenset()) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that anybody may see, and those that nobody may."""
    hidden = {name: value for name, value in variables.items() if env.SECRET_NAME.search(name) or redact_text(value, secrets) != value}
    return {name: value for name, value in variables.items() if name not in hidden}, hidden


class SecretsFormatter(logging.Formatter):
    """Writes log lines and their tracebacks without secrets, and without characters that steer a terminal: errors quote rows."""

    def __init__(self, text_format: str | None = None, secrets: AbstractSet[str] = frozenset()) -> None:
        super().__init__(text_format)
        self.secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return safe_text(redact_text(super().format(record), self.secrets))


def start_logging(text_format: str = "%(message)s", stream: TextIO | None = None) -> set[str]:
    """Lets all loggers of this process write to `stream` (by default standard output) from INFO on, without secrets.

    Returns the set of secrets that the lines lack besides those of the environment. Loading a config adds to it.
    """
    secrets: set[str] = set()
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(SecretsFormatter(text_format, secrets))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return secrets


def run_entry(main: Callable[[], int]) -> int:
    """Returns the exit code of `main`. An error that ends it is printed with its traceback to stderr, without secrets; then it is 1."""
    try:
        return main()
    except Exception as error:
        formatters = [handler.formatter for handler in logging.getLogger().handlers]
        secrets = {secret for formatter in formatters if isinstance(formatter, SecretsFormatter) for secret in formatter.secrets}
        sys.stderr.write(safe_text(redact_text("".join(traceback.format_exception(error)), secrets)))
        return 1
