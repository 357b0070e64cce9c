"""What requests over HTTP may ask for, and with which token ids a conversation goes on. Needs no vLLM.

What a session samples is meant to be trained on: it is drawn as rollouts are, and later turns go on from the very tokens of earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mrl.types import SamplingParams

Message = Mapping[str, object]

PREFIX = "required_prefix_token_ids"
"""The field of a request that says with which tokens its prompt begins; NeMo RL's name."""
MESSAGE_IDS = ("prompt_token_ids", "generation_token_ids")
"""Fields of an assistant's message that say the same, as NeMo Gym writes them."""
MESSAGE_EXTRAS = (*MESSAGE_IDS, "generation_log_probs")

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
    """What a request that leaves a parameter out gets, by vLLM's names: rollouts of training are drawn so."""
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
    """Why a request cannot be answered, whatever else it says; empty if it can."""
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
    """Why a request asks for too much; empty if it does not. Says nothing of what vLLM refuses by itself."""
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


def take_prefix(body: Mapping[str, object]) -> tuple[dict[str, object], list[int] | None]:
    """A request without the fields that say with which tokens its prompt begins, and these tokens, if it says so.

    Raises:
        ValueError: they are no token ids.
    """
    rest = {name: value for name, value in body.items() if name != PREFIX}
    given = body.get(PREFIX)
    messages = body.get("messages")
    if isinstance(messages, list):
        plain = [message for message in messages if isinstance(message, Mapping)]
        with_ids = next((message for message in reversed(plain) if MESSAGE_IDS[0] in message), None)
        if given is None and with_ids is not None:
            parts = [part for name in MESSAGE_IDS if isinstance(part := with_ids.get(name), list)]
            given = [token_id for part in parts for token_id in part] if len(parts) == len(MESSAGE_IDS) else []
        rest["messages"] = [_without_ids(message) for message in messages]
    if given is None:
        return rest, None
    if not isinstance(given, list) or not given or not all(type(token_id) is int and token_id >= 0 for token_id in given):
        raise ValueError(f"{PREFIX} (or {' and '.join(MESSAGE_IDS)} of a message): must be a list of token ids")
    return rest, given


def _without_ids(message: object) -> object:
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if name not in MESSAGE_EXTRAS}


def num_messages_to_answer(messages: Sequence[Message]) -> int:
    """How many messages there are up to the last one of the assistant; 0 if it has not said anything."""
    return max((index + 1 for index, message in enumerate(messages) if message.get("role") == "assistant"), default=0)


def continued(sampled_ids: Sequence[int], answered_ids: Sequence[int], whole_ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """The tokens of a conversation that goes on: those that were sampled, and what the chat template writes behind them.

    `sampled_ids` are the prompt and the answer of the last turn as they were, `answered_ids` the same messages as the template writes
    them, and `whole_ids` all messages. Template and model may differ in how they cut a text into tokens, and in whether thoughts of earlier
    turns stay: places are told by the number of end marks (`end_ids`) up to them.

    Raises:
        ValueError: the template ends no message with one of `end_ids`, or writes fewer messages than before.
    """
    num_ends = sum(token_id in end_ids for token_id in answered_ids)
    ends = [index for index, token_id in enumerate(whole_ids) if token_id in end_ids]
    if not 0 < num_ends <= len(ends):
        raise ValueError(
            f"the chat template writes {num_ends} end marks up to the last answer and {len(ends)} in the whole conversation; "
            f"without one of the tokens {sorted(end_ids)} behind each answer a conversation cannot go on from the tokens that were sampled"
        )
    end = ends[num_ends - 1]
    # An answer that was cut off at its longest has no end mark of its own.
    kept = sampled_ids[:-1] if sampled_ids[-1] == whole_ids[end] else sampled_ids
    return [*kept, *whole_ids[end:]]
