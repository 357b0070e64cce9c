# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own that trains as its config says, whatever its algorithm: `own_loop.py CONFIG [a.b=c ...]`."""

from __future__ import annotations

import asyncio
import sys

from mrl import api


async def main() -> None:
    async with api.start(sys.argv[1], sys.argv[2:]) as loop:
        while not loop.is_over:
            await loop.policy.train(loop.rollouts.sequences(await loop.rollouts.take()))
            await loop.refit.run()


if __name__ == "__main__":
    asyncio.run(main())
