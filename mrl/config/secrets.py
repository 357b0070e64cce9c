# SPDX-License-Identifier: Apache-2.0
"""Secrets of the environment and of configs, blanked out of everything that is written: saved configs, messages, log lines, tracebacks.

The secrets of a config are the values of keys that are called like a secret, and of environment variables that its expressions read.
`load_config` collects them in the config's `Facts`, and in the set that the log handler of the entry blanks out.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime
from pathlib import Path
from typing import Literal, TextIO

from conversion.files.durable import write_atomic
from mrl import env
from mrl.config.errors import REDACTED
from mrl.config.texts import safe_text

LogStyle = Literal["plain", "text", "terminal", "actor", "json"]
"""plain: a report; text: a run's log, which in a terminal is `terminal`; actor: the log of one process; json: an object a line."""
PREFIXES: dict[LogStyle, str] = {"text": "{time:%F %T} {level} ", "terminal": "{time:%T} ", "actor": "{time:%F %T.%f} {level} {name}: "}
TRACEBACK = "traceback.txt"
STORY = "story"
"""The logger of what tutorials show, which has no times in a terminal."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # Ray colors the errors of its actors
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
    known = env.secret_values() | secrets
    # A message may quote a single line of a multi-line key (PEM).
    lines = {line for secret in known for line in map(str.strip, secret.splitlines()) if len(line) >= env.MIN_SECRET_LENGTH}
    for secret in sorted(known | lines, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _URL_TOKEN.sub(rf"\1{REDACTED}", _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text))


def split_secrets(variables: Mapping[str, str], secrets: AbstractSet[str] = frozenset()) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that are public, and those that are secret."""
    hidden = {name: value for name, value in variables.items() if env.SECRET_NAME.search(name) or redact_text(value, secrets) != value}
    return {name: value for name, value in variables.items() if name not in hidden}, hidden


class SecretsFormatter(logging.Formatter):
    """Writes log lines and tracebacks without secrets and terminal control characters, because errors quote rows."""

    def __init__(self, style: LogStyle = "plain", secrets: AbstractSet[str] = frozenset()) -> None:
        super().__init__()
        self.style: LogStyle = style
        self.secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record; every line of its text gets the prefix."""
        text = safe_text(redact_text(_COLOR.sub("", super().format(record)), self.secrets))
        now = datetime.fromtimestamp(record.created).astimezone()
        if self.style == "json":
            said = {"time": now.isoformat(timespec="milliseconds"), "level": record.levelname, "logger": record.name}
            return json.dumps({**said, "message": text.strip("\n")})
        if self.style == "plain" or (self.style == "terminal" and record.name == STORY):
            return text
        prefix = PREFIXES[self.style].format(time=now, level=record.levelname, name=record.name)
        return "\n".join(prefix + line for line in text.strip("\n").split("\n"))


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a closed reader, such as `head` after its lines."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


def start_logging(style: LogStyle = "plain", stream: TextIO | None = None) -> set[str]:
    """Makes all loggers of this process write to `stream` (by default standard output) from INFO on, without secrets."""
    secrets: set[str] = set()
    output: TextIO = stream or sys.stdout
    handler = _Handler(output)
    handler.setFormatter(SecretsFormatter("terminal" if style == "text" and output.isatty() else style, secrets))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(style != "plain")
    return secrets


def run_entry(main: Callable[[], int]) -> int:
    """Returns the exit code of `main`. A fatal error goes to stderr, without secrets, with its reason first and last, and gives 1."""
    try:
        return main()
    except Exception as error:
        reason = f"The attempt ended: {type(error).__name__}: {' '.join(str(error).split())}"
        for text in (reason, "".join(traceback.format_exception(error)), reason):
            sys.stderr.write(_formatted(text) + "\n")
        return 1


def note_traceback(error: Exception, folder: Path) -> None:
    """Writes the traceback of an error, without secrets, to a file in a folder, or to stderr if that cannot be written."""
    text = _formatted("".join(traceback.format_exception(error))) + "\n"
    try:
        write_atomic(folder / TRACEBACK, text)
    except OSError:
        sys.stderr.write(text)


def _formatted(text: str) -> str:
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    formatter = next((found for found in formatters if isinstance(found, SecretsFormatter)), SecretsFormatter())
    return formatter.format(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, None)).rstrip("\n")
