"""Secrets of the environment and of configs, blanked out of everything that is written: saved configs, messages, log lines.

Secrets of a config are values under a secret's key, and of environment variables that it names. Variables are noted where OmegaConf's own
resolvers read them, however an expression spells them.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TextIO

from omegaconf import Container, Node, OmegaConf
from omegaconf.resolvers import oc

from mrl import env
from mrl.config.errors import REDACTED
from mrl.config.texts import safe_text

_URL_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s/:@]*):[^\s/]+@")
_URL_TOKEN = re.compile(r"([?&][\w-]*(?:token|key|secret|password|signature|sig)=)[^&\s]+", re.IGNORECASE)

_noted: set[str] = set()


def note_secrets(settings: Iterable[tuple[str, object]]) -> None:
    """Remembers the secrets of (name of a key, value as written)."""
    for name, value in settings:
        if isinstance(value, str) and env.SECRET_NAME.search(name) and "${" not in value:
            _note(value)


def register_resolvers() -> None:
    """From here on, the values that `oc.env` gives are noted, and what `oc.decode` makes of them."""
    for name, resolver in (("oc.env", _env), ("oc.decode", _decode)):
        OmegaConf.register_resolver(name, resolver, replace=True, annotation_validation="off")


def _env(name: str, *default: object) -> str | None:
    """As OmegaConf's. Places and sizes are no secrets, nor are defaults, unless the variable is called like a secret."""
    value = oc.env(name, *default)
    if value is not None and (env.SECRET_NAME.search(name) or (env.variable(name) and not env.PLACE_NAME.fullmatch(name))):
        _note(value)
    return value


def _decode(text: str | None, _parent_: Container, _node_: Node) -> object:
    """As OmegaConf's: without the quotes a secret is another text."""
    value = oc.decode(text, _parent_, _node_)
    if any(secret in str(text) for secret in _noted):
        _note(value)
    return value


def _note(value: object) -> None:
    """Remembers a text, or all texts in a list or mapping."""
    if isinstance(value, str) and len(value) >= env.MIN_SECRET_LENGTH:
        _noted.add(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _note(inner)


def redact(value: object, key: str = "") -> object:
    """A copy of plain data in which text under a secret's key, known secrets, and passwords in URLs are blanked out."""
    if isinstance(value, dict):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, key) for inner in value]
    return redact_text(REDACTED if env.SECRET_NAME.search(key) else value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """`text` without the values of secret environment variables, without secrets of configs, and without passwords in URLs."""
    for secret in sorted(env.secret_values() | _noted, key=len, reverse=True):
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
