# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own that trains as its config says, whatever its algorithm: `own_loop.py CONFIG [a.b=c ...]`."""

from __future__ import annotations

import sys

from mrl import api


def main() -> None:
    with api.start(sys.argv[1], sys.argv[2:]) as loop:
        while not loop.is_over:
            loop.policy.train(loop.rollouts.sequences(loop.rollouts.take()))
            loop.refit.run()


if __name__ == "__main__":
    main()
