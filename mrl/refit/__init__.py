# SPDX-License-Identifier: Apache-2.0
"""The refit: carries out a schedule between trainer ranks and engine workers, verifies every byte. Needs torch only."""

from dataclasses import dataclass


class RefitError(RuntimeError):
    """The engine's weights are not proven to be the trainer's. No token may be sampled from it."""


class GivenUp(RefitError):
    """The attempt was abandoned by another participant, for the reason in the message."""


@dataclass(frozen=True)
class Refused:
    """An error as a worker hands it to its engine. vLLM makes a failure of a bare one, even if it is returned."""

    error: RefitError
