# SPDX-License-Identifier: Apache-2.0
"""The refit: carries out a schedule between trainer ranks and engine workers, verifies every byte. Needs torch only."""


class RefitError(RuntimeError):
    """The engine's weights are not proven to be the trainer's. No token may be sampled from it."""


class GivenUp(RefitError):
    """The attempt was abandoned by another participant, for the reason in the message."""
