# SPDX-License-Identifier: Apache-2.0
"""Requests for tests, and an engine run to its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mrl.types import (
    FixedAdvantage,
    Rollout,
    RolloutInfo,
    RolloutRequest,
    SamplingParams,
    TeacherTokens,
    TrainSequence,
    request_seed,
)

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

MAX_MODEL_LEN = 256
"""Context of the engines of tests/stack/rollout."""

StartEngine = Callable[..., "Engine"]
"""Starts an engine on a folder or on the tiny checkpoint with a seed, with fields of `VllmConfig` by name."""


def request(
    token_ids: Sequence[int],
    *,
    prompt_id: str = "p",
    rollout_index: int = 0,
    max_new_tokens: int = 16,
    stop_token_ids: tuple[int, ...] = (),
) -> RolloutRequest:
    """A request at temperature 1 with the seed that a run would give it."""
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=None, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids
    )
    return RolloutRequest(
        prompt_id, rollout_index, 0, request_seed(42, 0, prompt_id, rollout_index), tuple(token_ids), sampling
    )


def pulled(
    rollout: Rollout,
    advantage: float,
    is_valid: bool,
    reward: float = 0.0,
    fixed_advantages: tuple[FixedAdvantage, ...] = (),
    teacher: TeacherTokens | None = None,
    place: int = 0,
) -> TrainSequence:
    """A sequence as a policy rank packs it."""
    return TrainSequence(
        replace(RolloutInfo.of(rollout, rollout), place=place), advantage, is_valid, reward, fixed_advantages, teacher
    )


def random_requests(
    count: int, *, lengths: tuple[int, int] = (3, 60), max_new_tokens: int = 16, seed: int = 0
) -> list[RolloutRequest]:
    """Requests with prompts of random bytes, each of a random length within `lengths`."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(*lengths))] for _ in range(count)]
    return [request(prompt, prompt_id=f"p{i}", max_new_tokens=max_new_tokens) for i, prompt in enumerate(prompts)]


def run(
    engine: Engine, arrivals: Mapping[int, Sequence[RolloutRequest]] | Sequence[RolloutRequest]
) -> dict[str, Rollout]:
    """Rollouts by request id. `arrivals`: requests to add before the given step, or all at once."""
    waiting = dict(arrivals) if isinstance(arrivals, Mapping) else {0: arrivals}
    rollouts, step = {}, 0
    while waiting or engine.num_unfinished:
        engine.add(waiting.pop(step, ()))
        for rollout in engine.step():
            rollouts[rollout.request.request_id] = rollout
        step += 1
    return rollouts


def differences(first: Mapping[str, Rollout], second: Mapping[str, Rollout]) -> list[str]:
    """Ids of requests whose tokens, finish reason or logprob bits differ."""
    assert first.keys() == second.keys()
    return [key for key in first if _bits(first[key]) != _bits(second[key])]


def _bits(rollout: Rollout) -> tuple[bytes, bytes, str]:
    return rollout.token_ids.tobytes(), rollout.generator_logprobs.tobytes(), rollout.finish_reason
