# SPDX-License-Identifier: Apache-2.0
"""Secrets of environment and configs, blanked out of all that is written: saved configs, messages, logs, tracebacks.

The secrets of a config are the values of keys that are called like a secret, and of environment variables that its
expressions read. `load_config` collects them in the config's `Facts`, and in the set that the log handler of the entry
blanks out.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

import mrl
from conversion.files.durable import write_atomic
from mrl import env
from mrl.config.errors import REDACTED
from mrl.config.passwords import without_passwords, without_tokens
from mrl.config.streams import safe_console, write_no_more
from mrl.config.texts import safe_text, spelled

LogStyle = Literal["plain", "text", "terminal", "actor", "json"]
"""plain: a report; text: a run's log, which in a terminal is `terminal`; actor: the log of one process; json: an object
a line.
"""
PREFIXES: dict[LogStyle, str] = {
    "text": "{time:%F %T} {level} ",
    "terminal": "{time:%T} ",
    "actor": "{time:%F %T.%f} {level} {name}: ",
}
TRACEBACK = "traceback.txt"
STORY = "story"
"""The logger of what tutorials show, which has no times in a terminal."""

JOB = "job"
"""The logger of files of jobs: standard output gets them as they are submitted, wherever all else goes."""

OUR_LOGGERS = ("mrl", "conversion", STORY, JOB)
_FORMAT_WARNING = warnings.formatwarning
_FRAME = re.compile(r"\s+File \".*\", line \d+|\s*(?:\x1b\[\d+m)?ray::")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # Ray colors the errors of its actors
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.{0,9999}?-----END [A-Z ]{0,30}PRIVATE KEY-----", re.DOTALL
        ),
        REDACTED,
    ),
    # The user of a URL may be a token. A password may hold `/` and `@`; `host:8000/a@b` has none.
    (
        re.compile(
            r"\b([a-zA-Z][\w+.-]{0,30}://)(?!(?:git|hg|svn)@)"
            r"(?:(?!\[[\da-fA-F:.]+\])[^\s/?#@:]{0,200}:(?!\d{1,5}[/?#])\S{0,500}@|[^\s/?#@:]{1,500}@)"
        ),
        rf"\1{REDACTED}@",
    ),
    (
        re.compile(r"(?<![\w/.:@-])(?!mailto:)[A-Za-z][\w.+-]{0,60}:[^\s/@:]{3,200}@(?!sha256:)(?=[\w-]+[.:/])"),
        f"{REDACTED}@",
    ),
    # Addresses that are a secret as a whole: who knows them may post there.
    (
        re.compile(
            r"\b(hooks\.[\w.-]{1,60}|chat\.googleapis\.com|api\.telegram\.org|https?://[^\s/]{1,100}(?:/[\w-]{1,40}){0,4}?/webhook\w{0,3})/"
            r"[^\s\"']{8,}",
            re.IGNORECASE,
        ),
        rf"\1/{REDACTED}",
    ),
    (re.compile(r"\b(discord(?:app)?\.com/api/webhooks)/\S+"), rf"\1/{REDACTED}"),
    # Options and lines of commands: --password X, curl -u user:X, sshpass -p X, login me password X of a netrc.
    (
        re.compile(
            r"((?:^|\s)--[\w-]{0,40}(?:password|passwd|passphrase|token|secret|api-?key)\s|\blogin\s\S{1,80}\spassword\s|"
            r"\bsshpass\s-p\s?|\b(?:docker\slogin|redis-cli|mysql\w{0,9}|mariadb[\w-]{0,9})\s(?:[^\s;|&]{1,60}\s){0,9}?-[pa]\s?|"
            r"\b(?:password|passwd|passphrase)(?::\s|\sis\s(?=\S*\d))|\bcurl\s(?:-\S{1,40}\s){0,9}(?:-u|--user)\s|(?<![a-z])api_?key\s(?=\S*\d))"
            r"(?!-|[\d.]+(?:\s|$))\S{5,}",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(
            r"\b((?:[\w-]{1,60}-)?authorization|x-(?:[\w-]{1,60}-)?(?:key|token|auth|secret)|cookie|set-cookie)"
            r"(['\"]?\s?[:=]\s?['\"]?)(?!['\"{\[])[^\n'\"]+",
            re.IGNORECASE,
        ),
        rf"\1\2{REDACTED}",
    ),
    (re.compile(r"\b(bearer|basic)\s(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1 {REDACTED}"),
    # AccountKey=, password=, "password": "...".
    (
        re.compile(
            r"((?<![a-zA-Z])(?:[\w-]{1,60}[_-]|PG)?(?:password|passwd|passphrase|pwd|secret|signature|client_?secret|"
            r"(?:api|access|private|account|secret|shared_?access)[_-]?(?:key|signature)|(?:access|auth|bearer|refresh|id|api)[_-]?token)"
            r"(?:\s?=\s?|['\"]\s?:\s?)['\"]?)(?!(?:null|None|true|false)\b|\$\{|[\d.]+\b)[^\s'\"&;,)}]{3,}",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    # Tokens of GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS, Google, npm, PyPI and NVIDIA, and JSON web tokens.
    (
        re.compile(
            r"\b(?:gh[opsru]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|hf_[a-zA-Z0-9]{20,}|sk-(?=\S*\d)[\w-]{20,}|xox[a-z]-[\w-]{8,}|"
            r"(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{10,}|"
            r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|[rs]k_(?:live|test|prod)_\w{16,}|dckr_[po]at_[\w-]{20,}|"
            r"SG\.[\w-]{16,}\.[\w-]{16,}|hv[sbr]\.[\w-]{20,}|ATATT3\S{20,}|do[oprs]_v1_[a-f0-9]{32,}|"
            r"dapi[a-f0-9]{32}|AGE-SECRET-KEY-1\w{20,}|\d{8,10}:AA[\w-]{30,}|secret_(?=\S*\d)(?=\S*[A-Z])[\w.-]{24,}|sq0[a-z]{3}-[\w-]{20,}|(?:AC|SK)[a-f\d]{32}\b|"
            r"[a-f\d]{32}-us\d{1,2}\b|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,})"
        ),
        REDACTED,
    ),
    # Tokens of others, which begin with a word of theirs: xai-, gsk_, r8_, sk_live_, dckr_pat_, lin_api_, ...
    (
        re.compile(
            r"\b([a-z][a-z0-9]{1,11}(?:[_-][a-z0-9]{1,6}){0,2}[_-])"
            r"(?=(?:[A-Za-z]*\d){2})(?=(?:[a-z\d]*[A-Z]){3})(?=(?:[A-Z\d]*[a-z]){3})[A-Za-z0-9]{20,}\b"
        ),
        rf"\1{REDACTED}",
    ),
)
"""Texts that look like a secret, and the text that takes their place. Secrets that are known go first."""

_PARAMETER = re.compile(r"([?&#]([\w.~-]{1,60})=)([^&\s#'\"]+)")
_PUBLIC_PARAMETER = re.compile(
    r"page(_?size)?|limit|offset|format|revision|rev|ref|branch|tag|version|api-version|download|type|path|split|config|subset|sslmode|"
    r"s[verpt]|spr|expires|x-amz-(algorithm|date|expires|signedheaders)",
    re.IGNORECASE,
)
"""Parameters of URLs whose values may be shown. Others are hidden, unless they are a number or a switch."""
_SWITCHED = re.compile(
    r"-?\d[\d.,]*(?:e[+-]?\d+)?|true|false|on|off|yes|no|auto|none|null|\.\.\.|<\w+>|\$\{?\w+\}?", re.IGNORECASE
)

_ASSIGNMENT = re.compile(
    r"(?<![\w$./?&#-])(?P<name>[A-Z][A-Z\d]*(?:_[A-Z\d]+)+|PG[A-Z]+|[A-Z]+PASS|(?<=export )\w+|(?<=\s-e )\w+)="
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"&;,)}\]\x60]+)"
)
"""An environment variable in a text, which is shown by the rule of `env_vars`."""

_PUBLIC_WORD = re.compile(
    r"--[a-zA-Z][\w-]*|-[a-zA-Z]|-?[\d.]+(e-?\d+)?|\S*\.(?:py|ya?ml|jsonl?)|algorithm=[a-z_]+|"
    r"[+~]{0,2}[a-z_]+(?:\.[\w-]+)+(?:=.*)?",
    re.DOTALL,
)
"""Words of a command that tell nothing but options, numbers, files of code and configs, and config keys."""

_OF_MODELS = frozenset(("chat_template", "system_prompt", "stop_strings"))
"""Keys whose texts the model reads or writes: `one token: the letter`, `{% set x_token = y %}`. A saved config that
changed them would replay and evaluate another run.
"""

_WORD = re.compile(r"[A-Z]?[a-z]{0,10}|[A-Z]{0,11}")
"""A word, which other texts have, too: hidden as the value of a variable, and not wherever it is said."""


def note_secrets(settings: Iterable[tuple[str, object]], secrets: set[str]) -> None:
    """Adds to `secrets` those of (dotted key, value as written)."""
    for key, value in settings:
        is_called_so = bool(env.SECRET_NAME.search(key.rpartition(".")[2]))
        if env.is_hidden(key, value) and "${" not in str(value) and (is_called_so or not _WORD.fullmatch(str(value))):
            note_texts(value, secrets)
            if is_called_so and isinstance(value, str):  # `admin hunter2`: a message may quote a part
                note_texts([part for part in value.split() if not part.isalpha()], secrets)


def note_texts(value: object, secrets: set[str]) -> None:
    """Adds a text, or all texts in lists and mappings, to `secrets`, unless they are too short to tell anything."""
    if isinstance(value, str) and len(value) >= env.MIN_SECRET_LENGTH:
        secrets.add(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            note_texts(inner, secrets)


def redact(value: object, secrets: AbstractSet[str] = frozenset(), key: str = "") -> object:
    """A copy of plain data where text under a secret's key (dotted), `secrets`, and secret-like texts are blanked."""
    if isinstance(value, dict):
        return {name: redact(inner, secrets, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, secrets, key) for inner in value]
    if isinstance(value, str) and key.rpartition(".")[2] in _OF_MODELS:
        return without_tokens(_without_known(value, secrets), REDACTED)
    return redact_text(REDACTED if env.is_hidden(key, value) else value, secrets) if isinstance(value, str) else value


def _without_known(text: str, secrets: AbstractSet[str]) -> str:
    known = _known(env.secret_values() | secrets)
    return text if known is None else known.sub(REDACTED, text)


def redact_text(text: str, secrets: AbstractSet[str] = frozenset()) -> str:
    """`text` without `secrets`, the values of secret environment variables, and texts that look like secrets."""
    text = without_passwords(without_tokens(_without_known(text, secrets), REDACTED), REDACTED)
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return _ASSIGNMENT.sub(_public_variable, _PARAMETER.sub(_public_parameter, text))


def redact_command(words: Sequence[str], secrets: AbstractSet[str] = frozenset()) -> list[str]:
    """The words of a command without secrets.

    A word is shown only if it is known to be none: the program, an option's name, a number, a file, or a config key
    with its value, of a hidden key without. Programs of users may take what they like, `-p hunter2`.
    """
    shown = list[str]()
    for before, word in zip(["", *words], words, strict=False):
        key, is_override, value = word.partition("=")
        name = key.lstrip("+~")
        if is_override and (env.is_hidden(name, value) or f"{env.VARIABLES_KEY}:" in word):
            shown.append(f"{key}={REDACTED}")
        elif not (before in ("", "-m") or _PUBLIC_WORD.fullmatch(word) or os.path.isfile(word)):
            shown.append(f"{key}={REDACTED}" if is_override else REDACTED)
        else:
            shown.append(redact_text(word, secrets))
    return shown


def has_secret(words: Sequence[str], secrets: AbstractSet[str]) -> bool:
    """True if a word of a command holds a secret, or looks like one."""
    for word in words:
        key, is_override, value = word.partition("=")
        if is_override and (env.is_hidden(key.lstrip("+~"), value) or f"{env.VARIABLES_KEY}:" in word):
            return True
        if redact_text(word, secrets) != word:
            return True
    return False


@cache
def _known(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Pattern of secrets and their lines as spelt in plain text, shell, JSON, Python, URLs and base64; None if none."""
    # A message may quote a single line of a multi-line key (PEM).
    lines = {
        line for secret in secrets for line in map(str.strip, secret.splitlines()) if len(line) >= env.MIN_SECRET_LENGTH
    }
    spelled = {
        form
        for text in secrets | lines
        for form in (
            text,
            text.replace("'", "'\"'\"'"),
            json.dumps(text)[1:-1],
            json.dumps(text, ensure_ascii=False)[1:-1],
            repr(text)[1:-1],
            quote(text, safe=""),
            quote(text),
            base64.b64encode(text.encode(errors="surrogateescape")).decode().rstrip("="),
        )
    }
    return re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))) if spelled else None


def _public_parameter(found: re.Match[str]) -> str:
    start, name, value = found.groups()
    is_shown = _PUBLIC_PARAMETER.fullmatch(name) or (_SWITCHED.fullmatch(value) and not env.is_secret_variable(name))
    return found[0] if is_shown else start + REDACTED


def _public_variable(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"].strip("'\"")
    is_shown = env.is_public_variable(name, value) or (_SWITCHED.fullmatch(value) and not env.is_secret_variable(name))
    return found[0] if is_shown else f"{name}={REDACTED}"


def split_secrets(
    variables: Mapping[str, str], secrets: AbstractSet[str] = frozenset()
) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that are public, and those that may be secret."""
    hidden = {
        name: value
        for name, value in variables.items()
        if not env.is_public_variable(name, value) or redact_text(value, secrets) != value
    }
    return {name: value for name, value in variables.items() if name not in hidden}, hidden


class SecretsFormatter(logging.Formatter):
    """Writes log lines and tracebacks without secrets and terminal control characters, because errors quote rows."""

    def __init__(self, style: LogStyle = "plain", secrets: AbstractSet[str] = frozenset()) -> None:
        super().__init__()
        self.style: LogStyle = style
        self.secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record; every line of its text gets the prefix."""
        text = _COLOR.sub("", super().format(record))
        text = safe_text(text) if record.name == JOB else spelled(safe_text(redact_text(text, self.secrets)))
        now = datetime.fromtimestamp(record.created).astimezone()
        if self.style == "json":
            said = {"time": now.isoformat(timespec="milliseconds"), "level": record.levelname, "logger": record.name}
            return json.dumps({**said, "message": text.strip("\n")})
        if self.style == "plain" and record.levelno == logging.WARNING:
            return f"[WARNING] {text}"
        if self.style == "plain" or (self.style == "terminal" and record.name == STORY):
            return text
        prefix = PREFIXES[self.style].format(time=now, level=record.levelname, name=record.name)
        return "\n".join(prefix + line for line in text.strip("\n").split("\n"))


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        stream, self.stream = self.stream, sys.stdout if record.name == JOB else self.stream
        try:
            super().emit(record)
        finally:
            self.stream = stream

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a closed reader, such as `head` after its lines."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            write_no_more(self.stream)
        else:
            super().handleError(record)


def start_logging(style: LogStyle = "plain", stream: TextIO | None = None) -> set[str]:
    """Makes all loggers of this process write to `stream` (default: standard output) from INFO on, without secrets."""
    secrets: set[str] = set()
    output: TextIO = stream or sys.stdout
    handler = _Handler(output)
    handler.setFormatter(SecretsFormatter("terminal" if style == "text" and output.isatty() else style, secrets))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(style != "plain")
    warnings.formatwarning = lambda *words, **options: safe_text(
        redact_text(_FORMAT_WARNING(*words, **options), secrets)
    )

    def of_library(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = logging.LogRecord(*arguments, **options)
        if record.name.partition(".")[0] not in OUR_LOGGERS:
            # Badly logged texts are left for logging itself, which reports them.
            with suppress(TypeError, ValueError, KeyError):
                record.msg, record.args = safe_text(redact_text(_COLOR.sub("", record.getMessage()), secrets)), None
        return record

    # Libraries with handlers of their own (transformers) quote configs of models, too.
    logging.setLogRecordFactory(of_library)
    return secrets


def run_entry(main: Callable[[], int]) -> int:
    """Returns `main`'s exit code. A fatal error goes to stderr without secrets, reason first and last, and gives 1.

    A missing package gives 2, and the command that installs it; so does a file of somebody else. Whatever is printed
    meanwhile, no text controls a terminal.
    """
    with safe_console():
        return _run(main)


def _run(main: Callable[[], int]) -> int:
    try:
        return main()
    except Exception as error:
        if text := mrl.lacking(error) or mrl.barred(error):
            sys.stderr.write(_formatted(text) + "\n")
            return 2
        reason = f"The attempt ended: {reason_of(error)}"
        for text in (reason, "".join(traceback.format_exception(error)), reason):
            sys.stderr.write(_formatted(text) + "\n")
        return 1


def reason_of(error: BaseException) -> str:
    """Kind and text of an error as one line, without the traceback that Ray writes into its actors' errors."""
    lines = str(error).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return f"{type(error).__name__}: {' '.join(' '.join(lines).split())}"
    rest = lines[frames[-1] + 1 :]
    while rest and rest[0][:1].isspace():  # the line of code, and marks under it
        rest = rest[1:]
    return " ".join(" ".join(rest or lines[-1:]).split())


def note_traceback(error: Exception, folder: Path, *, is_needed: bool = True) -> None:
    """Writes an error's traceback, without secrets, to a file in a folder.

    If that cannot be written and `is_needed`, writes it to stderr, behind the reason.
    """
    text = _formatted("".join(traceback.format_exception(error))) + "\n"
    try:
        write_atomic(folder / TRACEBACK, text)
    except OSError:
        if is_needed:
            sys.stderr.write(_formatted(f"The attempt ended: {reason_of(error)}") + "\n" + text)


def without_secrets(text: str) -> str:
    """`text` without what the log of this process hides."""
    return redact_text(text, _formatter().secrets)


def _formatter() -> SecretsFormatter:
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return next((found for found in formatters if isinstance(found, SecretsFormatter)), SecretsFormatter())


def _formatted(text: str) -> str:
    return _formatter().format(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, None)).rstrip("\n")
