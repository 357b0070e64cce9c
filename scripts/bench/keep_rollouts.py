# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.bench.keep_rollouts`: the cost of keeping a step's rollouts for the next attempt, as a share of the step.

The loop pays for telling which groups are whole, and for following the steps; a thread writes, of which the processor time counts.
Ray's part, fetching the payloads, is left out: on the driver's node they are read where they lie.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from mrl.store.kept import KeptRollouts, WholeGroup
from mrl.store.ledger import LedgerState
from mrl.types import Prompt, Rollout, RolloutInfo, RolloutRequest, RunState, SamplingParams, Verdict

PROMPT = tuple(range(200))


def group_of(index: int, size: int, num_tokens: int, num_layers: int) -> WholeGroup:
    """A group from the weights before the first step, with routes of so many layers at eight experts a token."""
    name, rng = f"train:{index}", np.random.default_rng(index)
    sampling = SamplingParams(1.0, 1.0, None, num_tokens, (2,))
    rollouts = []
    for at in range(size):
        request = RolloutRequest(name, at, 0, at, PROMPT, sampling)
        tokens, logprobs = rng.integers(0, 131072, num_tokens, np.int32), rng.random(num_tokens, np.float32)
        routes = rng.integers(0, 128, (len(PROMPT) + num_tokens - 1, num_layers, 8), np.uint8) if num_layers else None
        rollouts.append(Rollout(request, 1, tokens, logprobs, "stop", routes))
    verdicts = [Verdict(1.0, True, "ok", "42", "x" * 4 * num_tokens)] * size
    return WholeGroup((0, name), Prompt(name, PROMPT, "?", "42", "math"), 1, [RolloutInfo.of(one, one) for one in rollouts], verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--generations", type=int, default=16, help="rollouts of a prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="of a rollout")
    parser.add_argument("--route-layers", type=int, default=0, help="layers whose routes come along (policy.router_replay)")
    parser.add_argument("--step-s", type=float, default=60.0, help="seconds of a step")
    parser.add_argument("--save-period", type=int, default=10, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()
    groups = [group_of(index, options.generations, options.tokens, options.route_layers) for index in range(options.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        state = RunState(step=0, weight_version=1)
        kept = KeptRollouts(
            Path(folder) / "rollouts",
            {},
            lag=1,
            limit_bytes=1e12,
            saves=lambda step: step % options.save_period == 0,
            pull=lambda infos: [info.pulled for info in infos],
            check_owner=lambda: None,
        )
        kept.follow(state, LedgerState())
        began, processor_s = time.monotonic(), time.process_time()
        for group in groups:
            kept.note(group)
        loop_s = time.monotonic() - began
        while not list(Path(folder).rglob("*.mrl")):
            kept.prepare(0, ends=True)
        writer_s = time.process_time() - processor_s - loop_s
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.mrl"))
        began = time.monotonic()
        kept.follow(RunState(step=1, weight_version=2), LedgerState(trained={1: tuple(group.key for group in groups)}))
        loop_s += time.monotonic() - began
        kept.close()
    share = 2 / options.save_period  # with lag 1, those from the weights of the checkpoint's step and of the one before it
    print(f"{options.prompts * options.generations} rollouts of {options.tokens} tokens: {size / 1e6:.0f} MB in one file")
    print(f"the loop: {loop_s * 1e3:.1f} ms = {loop_s / options.step_s:.4%} of a step of {options.step_s:g} s")
    print(f"the thread: {writer_s:.2f} s of processor time = {writer_s / options.step_s:.2%} of a step that is kept,")
    print(f"{share * writer_s / options.step_s:.2%} of all, as {share:.0%} of them are (a checkpoint every {options.save_period} steps)")


if __name__ == "__main__":
    main()
