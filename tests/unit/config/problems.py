# SPDX-License-Identifier: Apache-2.0
"""Problems of a config: those of loading it, and then those of its rules."""

from __future__ import annotations

import re

from mrl.config.load import read_run
from mrl.config.rules.checks import find_problems


def problems_of(*overrides: str, name: str = "grpo_tiny.yaml") -> list[str]:
    """The problems of a packaged config with overrides, without saying that these came from the command line."""
    config, _, problems = read_run(name, overrides)
    found = [*problems, *(find_problems(config) if config is not None else ())]
    return [type(problem)(re.sub(r" \(command line\)", "", problem)) for problem in found]
