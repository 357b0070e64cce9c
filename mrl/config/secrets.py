"""What a config says that must be written nowhere: values under a secret's key, and of environment variables that it names.

Variables are noted where they are read, by OmegaConf's own resolvers: however an expression spells them.
"""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import Container, Node, OmegaConf
from omegaconf.resolvers import oc

from mrl import env

REDACTED = "<redacted>"

_noted: set[str] = set()


def note_secrets(settings: Iterable[tuple[str, object]]) -> None:
    """Remembers the secrets of (name of a key, value as written)."""
    for name, value in settings:
        if isinstance(value, str) and env.SECRET_NAME.search(name) and "${" not in value:
            _note(value)


def noted_secrets() -> frozenset[str]:
    """All secrets of configs that this process has read."""
    return frozenset(_noted)


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
        _note_all(value)
    return value


def _note_all(value: object) -> None:
    if isinstance(value, str):
        _note(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _note_all(inner)


def _note(value: str) -> None:
    if len(value) >= env.MIN_SECRET_LENGTH:
        _noted.add(value)
