# SPDX-License-Identifier: Apache-2.0
"""The words of a command that takes a config: CONFIG, or NeMo RL's `--config CONFIG`, then overrides."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the words, and `--config`; `take_config` reads both."""
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG|a.b=c", help="config file (a path, or a packaged name), then overrides"
    )
    parser.add_argument("--config", metavar="CONFIG", help="the config file, as an option")


def take_config(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The config's name, None if neither names it, and the overrides."""
    if options.config is not None:
        return options.config, options.words
    return (options.words[0], options.words[1:]) if options.words else (None, [])


def needed_config(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, list[str]]:
    """The same; ends the command if neither names the config."""
    name, overrides = take_config(options)
    if name is None:
        parser.error("which config? Its file, or the name of a packaged one, is the first word, e.g. grpo_tiny.yaml")
    return name, overrides


def number(kind: Callable[[str], float], *, least: float, most: float = math.inf) -> Callable[[str], float]:
    """A `type` of argparse: an option's `int` or `float`, from `least` to `most`."""
    limits = f"from {least} to {most}" if most < math.inf else f"of {least} or more"
    rule = f"is no {'whole ' if kind is int else ''}number {limits}"

    def read(text: str) -> float:
        try:
            if least <= (value := kind(text)) <= most and abs(value) < math.inf:
                return value
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {rule}") from error
        raise argparse.ArgumentTypeError(f"{text} {rule}")

    return read
