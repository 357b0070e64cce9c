# SPDX-License-Identifier: Apache-2.0
"""Requests as vLLM takes them, and rollouts from its answers, or from requests that it has not finished."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from mrl.data.turns import appended, continued
from mrl.types import FinishReason, Proposals, Rollout, RolloutRequest, hashed_seed

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
SEED_STEP = 0x9E3779B97F4A7C15
"""Distance of the seeds of two draws of a request on CPU hosts: splitmix64's step."""


def turn_seed(request: RolloutRequest) -> int:
    """Seed of the request's turn: its own in the first, another one in each later turn.

    A turn that goes on counts on by its tokens: on CPU hosts it draws what it would have drawn unbroken; GPUs only get
    other random numbers than for the tokens before.
    """
    earlier, num_begun = request.transcript, num_begun_tokens(request)
    turns = len(earlier.turns) - (earlier.finish_reason == "abort") if earlier is not None else 0
    seed = hashed_seed(f"{request.seed}/{turns}") if turns else request.seed
    # int64, as vLLM's second model runner keeps seeds; generators take it modulo 2**64.
    return (seed + num_begun * SEED_STEP + 2**63) % 2**64 - 2**63


def num_begun_tokens(request: RolloutRequest) -> int:
    """Number of tokens that the request's turn has already."""
    earlier = request.transcript
    if earlier is None or earlier.finish_reason != "abort":
        return 0
    return len(earlier.token_ids) - earlier.last_turn_start


def sampling_params(request: RolloutRequest, *, max_model_len: int) -> SamplingParams:
    """A request's vLLM parameters: its own seed, only its stop tokens, logprobs of drawn tokens, one final answer."""
    room = max_model_len - len(request.context_ids)
    if room < 1:
        raise ValueError(
            f"prompt {request.prompt_id} has {len(request.context_ids)} tokens, but prompt and rollout share"
            f" policy.generation.vllm_cfg.max_model_len={max_model_len}; raise it or set data.max_input_seq_length"
        )
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        max_tokens=min(sampling.max_new_tokens - num_begun_tokens(request), room),
        seed=turn_seed(request),
        # The model folder's own end-of-sequence ids count only where the request lists them.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_token_ids),
        # 0 alternatives: the drawn token alone.
        logprobs=0,
        flat_logprobs=True,
        # A token may complete a string and bring more: all of it is kept.
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        # A stop string may be a special token, or hold one.
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout_of(
    request: RolloutRequest, answer: RequestOutput, *, versions: tuple[int, int], routes: np.ndarray | None
) -> Rollout:
    """The rollout in a finished answer of vLLM; `versions`: of the weights that it began with, and their number."""
    completion = answer.outputs[0]
    finish_reason = _FINISH_REASONS.get(completion.finish_reason)
    if finish_reason is None:
        raise RuntimeError(f"vLLM ended request {request.request_id} with finish reason {completion.finish_reason!r}")
    assert isinstance(completion.logprobs, FlatLogprobs)
    # The last token is drawn, and does not go through the model.
    num_forwarded = len(request.context_ids) + len(completion.token_ids) - 1
    found = completion.spec_decode_metrics
    if routes is not None and found is not None:
        # Proposals beyond the last token went through it, too.
        routes = routes[:num_forwarded]
    if routes is not None and len(routes) != num_forwarded:
        raise RuntimeError(
            f"request {request.request_id}: vLLM tells the routes of {len(routes)} tokens, {num_forwarded} went "
            "through it"
        )
    proposals = (
        Proposals()
        if found is None
        # The counts are of passes, by the number of tokens that were accepted.
        else Proposals(
            sum(found.histogram), found.num_draft_tokens, sum(n * count for n, count in enumerate(found.histogram))
        )
    )
    drawn = Rollout(
        request=replace(request, earlier=None),
        weight_version=versions[0],
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        generator_logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        finish_reason=finish_reason,
        routes=routes,
        num_weight_versions=versions[1],
        proposals=proposals,
    )
    return _behind(request.transcript, drawn)


def unfinished_rollout(request: RolloutRequest, state: RequestState, *, versions: tuple[int, int]) -> list[Rollout]:
    """The tokens that vLLM has drawn of a request, as a rollout with finish reason `abort`; none before the first."""
    assert state.detokenizer is not None and state.logprobs_processor is not None
    logprobs = state.logprobs_processor.logprobs
    assert isinstance(logprobs, FlatLogprobs)
    token_ids = np.asarray(state.detokenizer.output_token_ids, dtype=np.int32)
    if not len(token_ids):
        found = request.transcript
        return [found] if found is not None and found.finish_reason == "abort" else []
    drawn = Rollout(
        request=replace(request, earlier=None),
        weight_version=versions[0],
        token_ids=token_ids,
        generator_logprobs=np.asarray(logprobs.logprobs, dtype=np.float32),
        finish_reason="abort",
        num_weight_versions=versions[1],
    )
    return [_behind(request.transcript, drawn)]


def _behind(earlier: Rollout | None, drawn: Rollout) -> Rollout:
    if earlier is None:
        return drawn
    return continued(earlier, drawn) if earlier.finish_reason == "abort" else appended(earlier, drawn)
