# SPDX-License-Identifier: Apache-2.0
"""GRPO in a loop of your own, on the tiny model of the quickstart: `python examples/own_loop.py [a.b=c ...]`."""

import asyncio
import sys

import torch

from mrl import api

OVERRIDES = [
    "checkpointing.checkpoint_dir=results/own_loop",
    "grpo.max_num_steps=40",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
]


def with_advantages(group: api.RolloutGroup) -> list[api.TrainSequence]:
    """Each rollout with its reward against the mean of the others, over the standard deviation of the group.

    Masked rollouts, which have no reward, take no part.
    """
    judged = torch.tensor([verdict.has_reward for verdict in group.verdicts])
    rewards, advantages = torch.tensor(group.rewards, dtype=torch.float64)[judged], torch.zeros(len(group.rewards))
    if len(rewards) > 1:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        advantages[judged] = ((rewards - others) / (rewards.std() if rewards.std() > 0 else 1.0)).float()
    return [
        api.TrainSequence(rollout, float(advantage), verdict.is_valid, verdict.reward)
        for rollout, verdict, advantage in zip(group.rollouts, group.verdicts, advantages, strict=True)
    ]


async def main() -> None:
    # Starts Ray, Megatron and vLLM, proves that they hold the same weights, and goes on where the run folder ends.
    async with api.start("grpo_tiny.yaml", [*OVERRIDES, *sys.argv[1:]]) as loop:
        print(f"accuracy before: {(await loop.rollouts.validate())['val/accuracy']:.3f}")
        while not loop.is_over:
            # vLLM samples answers to the next prompts, and their environment judges them.
            groups = await loop.rollouts.take()
            sequences = [sequence for group in groups for sequence in with_advantages(group)]
            # Megatron computes old logprobs, packs batches, and makes optimizer steps by the loss of the config.
            metrics = await loop.policy.train(sequences)
            # vLLM gets the new weights, checksums over all bytes are compared; the step is logged, validated and saved
            # if that is due.
            metrics = await loop.refit.run(metrics)
            print(f"step {loop.state.step}: {metrics['refit/verified_bytes']:,.0f} bytes of the engines verified")
        accuracy = (await loop.rollouts.validate())["val/accuracy"]
        print(f"accuracy after: {accuracy:.3f}; saved {await loop.policy.save()}")


if __name__ == "__main__":
    asyncio.run(main())
