"""The error of a refit."""

from __future__ import annotations


class RefitError(RuntimeError):
    """The engine's weights are not proven to be the trainer's. No token may be sampled from it."""
