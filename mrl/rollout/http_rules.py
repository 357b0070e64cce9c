"""What requests over HTTP may ask for. Needs no vLLM.

What a session samples is meant to be trained on, so it is drawn as rollouts are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mrl.types import SamplingParams

MAX_ANSWERS = 1024
"""Answers of one request, over all its prompts."""
# The longest prompt is seldom above 5 characters a token; a run of spaces may be one token of many.
CHARACTERS_PER_TOKEN = 16

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (0,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}
"""vLLM's sampling parameters that bend the distribution, and the values at which they do not."""


def default_parameters(sampling: SamplingParams) -> dict[str, object]:
    """Values of the parameters that a request leaves out, by vLLM's names: those of training's rollouts."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    num_slots: int
    """Answers that the engine samples at the same time for requests over HTTP."""


def find_refusal(body: Mapping[str, object], limits: Limits, *, session_id: str | None) -> str:
    """Why the engine cannot answer a request; empty if it can."""
    if excess := find_excess(body, limits):
        return excess
    if body.get("stream"):
        return "stream=true: answers are not streamed; leave it out"
    if body.get("use_beam_search"):
        return "use_beam_search=true: there is no beam search; leave it out"
    prompt = body.get("prompt")
    if session_id is not None and isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        return "prompt: a session goes on with one prompt; send one request for each"
    return ""


def find_excess(body: Mapping[str, object], limits: Limits) -> str:
    """Why a request asks for too much; empty if it does not. Leaves out what vLLM refuses by itself."""
    num_characters = sum(_num_characters(body.get(name)) for name in ("prompt", "messages"))
    if num_characters > limits.max_model_len * CHARACTERS_PER_TOKEN:
        rule = f"policy.generation.vllm_cfg.max_model_len={limits.max_model_len} tokens hold no such text"
        return f"prompt or messages: {num_characters} characters; {rule}; shorten it"
    n, prompt = body.get("n"), body.get("prompt")
    num_answers = n if isinstance(n, int) else 1
    is_list_of_prompts = isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt)
    num_prompts = len(prompt) if is_list_of_prompts and isinstance(prompt, list) else 1
    if num_answers > limits.num_slots:
        rule = f"requests over HTTP have {limits.num_slots} of the engine's slots (policy.generation.vllm_cfg.http_server_share)"
        return f"n={num_answers}: {rule}; ask for fewer answers, several times"
    if num_answers * num_prompts > MAX_ANSWERS:
        return f"{num_prompts} prompts with n={num_answers}: a request has at most {MAX_ANSWERS} answers; send several requests"
    return ""


def _num_characters(value: object) -> int:
    """Characters of all texts in JSON."""
    num_characters, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, list):
            rest += item
        elif isinstance(item, dict):
            rest += item.values()
    return num_characters


def find_deviation(parameters: Mapping[str, object], sampling: SamplingParams) -> str:
    """Why a request must not be part of a session; empty if its tokens come from the distribution that the trainer compares with.

    `parameters` are vLLM's, by name; `sampling` is that of the run.
    """
    wanted = {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p,),
        "top_k": (sampling.top_k,) if sampling.top_k else (None, 0, -1),
        **NEUTRAL,
    }
    for name, values in wanted.items():
        if parameters[name] not in values:
            rule = f"sessions are drawn as policy.generation says, with {name}={values[0]}, because they may be trained on"
            return f"{name}={parameters[name]}: {rule}; leave it out, or ask outside of a session"
    return ""
