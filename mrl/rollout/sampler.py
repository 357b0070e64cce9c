"""How a rollout request is put to vLLM, and how vLLM's answer becomes a rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from mrl.data.turns import appended
from mrl.types import FinishReason, Rollout, RolloutRequest

_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def sampling_params(request: RolloutRequest, *, max_model_len: int) -> SamplingParams:
    """vLLM's parameters for a request: its own seed, exactly its stop tokens, logprobs of the drawn tokens, one answer at the end.

    Raises:
        ValueError: the prompt leaves no room for a token.
    """
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
        max_tokens=min(sampling.max_new_tokens, room),
        seed=request.turn_seed,
        # The model folder's own end-of-sequence ids count only where the request lists them.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_token_ids),
        # 0 alternatives: the drawn token alone.
        logprobs=0,
        flat_logprobs=True,
        # A token may complete a string and bring more: all of it is kept.
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout(
    request: RolloutRequest,
    answer: RequestOutput,
    *,
    weight_version: int,
    num_weight_versions: int = 1,
    routes: np.ndarray | None = None,
) -> Rollout:
    """The rollout in a finished answer of vLLM.

    Raises:
        RuntimeError: vLLM ended the request for a reason that is no rollout, or the routes are not those of all its tokens but the last.
    """
    completion = answer.outputs[0]
    finish_reason = _FINISH_REASONS.get(completion.finish_reason)
    if finish_reason is None:
        raise RuntimeError(f"vLLM ended request {request.request_id} with finish reason {completion.finish_reason!r}")
    assert isinstance(completion.logprobs, FlatLogprobs)
    num_forwarded = len(request.context_ids) + len(completion.token_ids) - 1
    if routes is not None and len(routes) != num_forwarded:
        raise RuntimeError(f"request {request.request_id}: vLLM tells the routes of {len(routes)} tokens, {num_forwarded} went through it")
    drawn = Rollout(
        request=replace(request, earlier=None),
        weight_version=weight_version,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        generator_logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        finish_reason=finish_reason,
        routes=routes,
        num_weight_versions=num_weight_versions,
    )
    return drawn if request.transcript is None else appended(request.transcript, drawn)
