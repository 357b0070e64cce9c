"""What a config says that must be written nowhere: values under a secret's key, and of environment variables that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mrl import env

REDACTED = "<redacted>"

# Also within other resolvers, and with a default behind the name.
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)")

_noted: set[str] = set()


def note_secrets(settings: Iterable[tuple[str, object]]) -> None:
    """Remembers the secrets of (name of a key, value as written). Places and sizes that come from the environment are none."""
    for name, value in settings:
        if not isinstance(value, str):
            continue
        found = [value] if env.SECRET_NAME.search(name) and "${" not in value else []
        found += [env.variable(variable) for variable in _VARIABLE.findall(value) if not env.PLACE_NAME.fullmatch(variable)]
        _noted.update(secret for secret in found if len(secret) >= env.MIN_SECRET_LENGTH)


def noted_secrets() -> frozenset[str]:
    """All that `note_secrets` was told in this process."""
    return frozenset(_noted)
