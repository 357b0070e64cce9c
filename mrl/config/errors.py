"""The one error that a bad config raises."""

from __future__ import annotations

from collections.abc import Sequence


class Unprovided(str):
    """A problem with what this machine has, not with what the config says: a file, a folder or a disk that is still to be provided."""


class Unchecked(Unprovided):
    """A problem that leaves rules unapplied: a model, or a value of the config, that is not known."""


class ConfigError(ValueError):
    """What is wrong with a config: all of it, one problem a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)
