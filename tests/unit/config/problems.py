# SPDX-License-Identifier: Apache-2.0
"""Problems of a config: those of loading it, and then those of its rules; and what users read of them."""

from __future__ import annotations

import re

from mrl.config.errors import Problem
from mrl.config.load import read_run
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig


def texts_of(config: RunConfig) -> list[str]:
    """The texts of the rules that a config breaks."""
    return list(map(str, find_problems(config)))


def problems_of(*overrides: str, name: str = "grpo_tiny.yaml") -> list[str]:
    """The problems of a packaged config with overrides, without saying that these came from the command line."""
    return list(map(text_of, found_with(*overrides, name=name)))


def text_of(problem: Problem) -> str:
    """The text of a problem without saying that its key came from the command line."""
    return re.sub(r" \(command line\)", "", str(problem))


def found_with(*overrides: str, name: str = "grpo_tiny.yaml") -> list[Problem]:
    """The problems of a packaged config with overrides."""
    config, _, problems = read_run(name, overrides)
    return [*problems, *(find_problems(config) if config is not None else ())]
