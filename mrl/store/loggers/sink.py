"""What a logger service is asked to do. One file per service beside this one; each imports its library and nothing of torch or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

HOST_STEP = "ray/ray_step"
"""The x axis of host metrics, as NeMo RL names it: seconds since the first start of the run."""
SAMPLES = "validation/samples"
CONFIG = "config"


@dataclass(frozen=True)
class Opening:
    """What a service gets to know of the run."""

    settings: dict[str, object]
    """Its section of `logger`; the names are those of the section."""
    folder: str
    """Folder of this attempt, for the service's own files."""
    run_folder: str
    """Folder of the run, the same in all attempts."""
    run_id: str
    """Id of the run, the same in all attempts, unless the service makes up its own."""
    is_resumed: bool
    """Whether a former attempt has used `run_id`."""
    config: dict[str, object]
    """The resolved config, without secrets."""

    def text(self, name: str) -> str | None:
        """A setting that is a text or null."""
        value = self.settings[name]
        return None if value is None else str(value)


@dataclass(frozen=True)
class Sample:
    """One rollout as text."""

    prompt: str
    rollout: str
    expected: str
    reward: float

    def block(self) -> str:
        """The sample for a console or a text panel."""
        parts = {"Prompt": self.prompt, "Rollout": self.rollout, "Expected answer": self.expected, "Reward": f"{self.reward:g}"}
        return "\n".join(f"{title}:\n{_indented(text)}" if "\n" in text else f"{title}: {text}" for title, text in parts.items())


class Sink(Protocol):
    """One service, open. Whatever its library raises is counted by the caller."""

    run_id: str
    """The id under which the next attempt continues."""
    place: str
    """Where the metrics are to be found, for the console."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a training step."""
        ...

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        """Records what the hosts were at, `seconds` after the first start of the run."""
        ...

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """Records validation rollouts as text."""
        ...

    def close(self) -> None:
        """Sends what is left and ends the run at the service."""
        ...


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The values of a nested config by dotted key; lists stay whole."""
    found: dict[str, object] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
