# SPDX-License-Identifier: Apache-2.0
"""Groups of rollouts, as short as tests want to write them."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.types import Prompt, RolloutGroup, RolloutInfo, Status, Verdict


def group(
    rewards: Sequence[float],
    *,
    name: str = "p",
    lengths: Sequence[int] | None = None,
    cut_off: Sequence[int] = (),
    invalid: Sequence[int] = (),
    flagged: Sequence[int] = (),
) -> RolloutGroup:
    """One rollout for each reward, of 4 tokens or `lengths`. `cut_off`, `invalid` and `flagged` are indices."""
    lengths = [4] * len(rewards) if lengths is None else lengths
    infos = [
        RolloutInfo(f"0/{name}/{i}", name, i, 1, 2, length, "length" if i in cut_off else "stop", None)
        for i, length in enumerate(lengths)
    ]
    statuses: list[Status] = [
        "error" if i in invalid else "flagged" if i in flagged else "ok" for i in range(len(rewards))
    ]
    verdicts = [
        Verdict(reward, status == "ok", status, "", "") for reward, status in zip(rewards, statuses, strict=True)
    ]
    return RolloutGroup(Prompt(name, (1, 2), "q", "a", "math"), tuple(infos), tuple(verdicts))
