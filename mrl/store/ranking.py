# SPDX-License-Identifier: Apache-2.0
"""The metric that ranks a run's checkpoints, `checkpointing.metric_name`, and texts that say so."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conversion.files.reading import read_file
from mrl.config.files import read_yaml
from mrl.metrics import NEMO_RL_RANKS, for_decisions
from mrl.store.advisories import number
from mrl.store.run_files import setting

BEST = ", best"


@dataclass(frozen=True)
class Ranking:
    """A metric and its direction."""

    name: str
    """Name in a step's metrics; "": newer is better."""
    higher_is_better: bool

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The number that ranks a step with these metrics; None if it has none that is finite."""
        value = for_decisions(self.name, metrics) if self.higher_is_better else metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    def texts(self, metrics: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
        """The ranking metric of each step that has it, such as `val/accuracy 0.203`; the best of several says so."""
        values = {step: value for step, found in metrics.items() if (value := self.value(found)) is not None}
        sign = 1 if self.higher_is_better else -1
        best = max(values, key=lambda step: (sign * values[step], step)) if len(values) > 1 else None
        return {step: f"{self.name} {number(value)}{BEST if step == best else ''}" for step, value in values.items()}

    def doubt(self, step: int, metrics: Mapping[str, float]) -> str:
        """Says that a validation has not measured the metric, and what it has measured; "" if all is well."""
        names = [name for name in sorted(metrics) if name.startswith("val/")]
        if not self.name.startswith("val/") or not names or self.name in metrics:
            return ""
        near = difflib.get_close_matches(self.name, names, n=1)
        known = [name.replace("/", ":", 1) for name in dict.fromkeys([*near, *names])]
        return (
            f"checkpointing.metric_name={self.name.replace('/', ':', 1)}: the validation of step {step} has no such "
            f"metric, and checkpoints without it rank last; it has {', '.join(known)}"
        )


def ranking_of(metric_name: object, higher_is_better: object) -> Ranking:
    """The ranking by these values of section `checkpointing`; the metric may have one of NeMo RL's names."""
    name = metric_name if isinstance(metric_name, str) else ""
    return Ranking(NEMO_RL_RANKS.get(name, name).replace(":", "/", 1), higher_is_better is not False)


def read_ranking(path: Path) -> Ranking:
    """The ranking of a run's resolved config; none if that cannot be read."""
    try:
        config = read_yaml(read_file(path).decode())
    except (OSError, ValueError):
        config = None
    keys = ("checkpointing.metric_name", "checkpointing.higher_is_better")
    return ranking_of(*(setting(config if isinstance(config, dict) else {}, key) for key in keys))
