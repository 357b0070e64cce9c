# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.train CONFIG [a.b=c ...]`: trains a model. This file is the training loop, and nothing else.

    data --> prompts --> rollouts --> batches --> trainer --> validation, checkpoint, metrics
                ^           ^                        |
                +-----------+---- refit, verified ---+

prompts     consumes        rows of the data, in their order (mrl/loop/queue.py)
            waits for       room: so many steps' prompts are under way as rollouts may be old
            unblocked by    a step that has its groups, or a refit
rollouts    consumes        a prompt each; a task per rollout (mrl/cluster/rollouts.py)
            waits for       an engine's or agent's tokens, then the verdict of its environment
            unblocked by    their answers, turn by turn
batches     consumes        judged groups: advantages, packed rows (mrl/loop/rollouts.py)
            waits for       the groups of the next step
            unblocked by    the last verdict on them
trainer     consumes        batches: old and reference logprobs, optimizer steps, weights for the engines
            waits for       all ranks, in the one thread that calls them (mrl/cluster/tasks.py)
            unblocked by    their answers; a refit also by the checksums of all bytes

All live in one event loop. A signal ends a wait for rollouts, and the run once its last finished step is saved.
SFT, DPO and reward models run the same loop on examples in place of rollouts. In PPO a critic judges the batches first,
and learns, too; in distillation teacher logprobs replace advantages, or make them.
"""

from __future__ import annotations

import sys

from mrl.signals import take_over

if __name__ == "__main__" and "--check" not in sys.argv:
    take_over()

from mrl import check
from mrl.config.secrets import run_entry

if __name__ == "__main__" and check.OPTION in sys.argv:
    # Before the imports below, which take longer than a check and need libraries that a login node may lack.
    sys.exit(run_entry(check.main))

from typing import TYPE_CHECKING

from mrl.api import Loop

if TYPE_CHECKING:
    from mrl.loop.run import Run, Supplier
    from mrl.types import RunState


async def train(run: Run[Supplier], state: RunState) -> None:
    """Trains from `state`, which it advances, until the run ends."""
    while not run.is_over:
        await train_step(run, state)


async def train_step(run: Run[Supplier], state: RunState) -> None:
    """Runs one step, from the public parts of `mrl.api`, which a loop of your own uses, too."""
    loop = Loop(run, state)
    # Engines sample rollouts of the next prompts, or have done so ahead; environments judge them; advantages; packed
    # rows.
    batches = await loop.take_batches()
    # Old and reference logprobs, values; then an optimizer step on each batch.
    await loop.policy.update(batches)
    # New weights into the engines, verified; then validation, checkpoint and metrics.
    await loop.refit.run()


if __name__ == "__main__":
    from mrl.loop.main import main
    from mrl.store.loggers.thread import exit_with

    exit_with(lambda: main(train))
