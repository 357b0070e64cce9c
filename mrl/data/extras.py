# SPDX-License-Identifier: Apache-2.0
"""Further fields of rows, beside roles, contents, questions and answers: others' meaning, and mrl's use of each.

Other trainers: TRL, axolotl, LLaMA-Factory, ms-swift, OpenRLHF, verl, NeMo RL and NeMo, unsloth, OpenAI's fine-tuning,
prime-rl, NeMo Gym. All else in a row is for its environment, and all else in a message for the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mrl.data.fields import REQUEST, Fields, Message, RowError

if TYPE_CHECKING:
    from mrl.config.schema.generation import GenerationConfig

TEMPLATE_KWARGS = "chat_template_kwargs"
"""Honoured: a row's own values for variables of the chat template, an object or its JSON text (TRL, prime-rl, Gym)."""
EXTRA_BODY = "extra_body"
"""Holds what a client of OpenAI's library adds to a request: only `TEMPLATE_KWARGS` of it are honoured."""
TEMPLATE_COLUMNS = (TEMPLATE_KWARGS, "apply_chat_template_kwargs", "chat_template_args", "template_kwargs")
"""Columns with such values, under the names of several trainers."""
VARIABLES = ("enable_thinking", "reasoning_effort")
"""Honoured where the chat template has such a variable: columns of verl and of OpenAI's requests."""
MARKS = ("weight", "train", "training", "trainable", "loss")
"""Honoured on messages: true or 1 learns it, false or 0 does not (OpenAI `weight`, axolotl `train`, ms-swift
`loss`).
"""
UNPAIRED = ("label", "kto_tag", "desirable", "is_desirable", "chosen")
"""Refused if false: the row, or the message, shows a reply that is not to be learned (TRL, LLaMA-Factory)."""
OTHER_THOUGHTS = ("thinking_blocks", "reasoning_details")
"""Refused on messages to learn: thoughts in a form that no chat template reads, unless they are there as text, too."""
CONTINUED = ("prefix", "partial")
"""Refused if true on the last message of a prompt: the reply would go on from it (Mistral, Moonshot)."""
OF_SAMPLING = (
    "sampling_params",
    "sampling_args",
    "sampling_parameters",
    "generation_kwargs",
    "generation_config",
    "gen_kwargs",
)
"""Refused in rows of prompts: all rollouts of a run are sampled alike."""
MARGIN = "margin"
"""Refused by reward models: TRL's loss subtracts it."""
_EXCLUDES = ("mask", "ignore", "skip", "exclude", "no", "not", "non")
_ABOUT_LEARNING = ("train", "learn", "loss", "weight", "supervis", *_EXCLUDES[:4])
"""Beginnings of words in names of marks. Others than `MARKS` are refused: only their author knows which value means
what.
"""

SAMPLED = {"temperature": "temperature", "top_p": "top_p"}
"""Fields of a request that must have the value of this key of policy.generation, if any: all rollouts of a run are
sampled alike.
"""
REQUESTED = ("input", "instructions", "tools", "metadata")
"""Fields of a request that are read."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tool_choice": ("auto",),
    "truncation": ("disabled",),
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
}
"""Fields of a request that change nothing with one of these values. Others are refused."""
WITHOUT_EFFECT = ("model", "user", "safety_identifier", "store", "stream", "background", "include", "service_tier",
                  "prompt_cache_key",
                  "parallel_tool_calls", "top_logprobs")  # fmt: skip
"""Fields of a request that change no prompt and no token that is drawn."""


def template_kwargs_of(fields: Fields, variables: Collection[str] | None) -> Fields:
    """The row's own values for variables of the chat template: its columns, or the metadata of Gym's request.

    `variables` are those that the template may have; None: unknown. RowError: a value is for another one.
    """
    request = fields.get(REQUEST)
    metadata = request.get("metadata") if isinstance(request, dict) else None
    found = dict[str, object]()
    if isinstance(metadata, dict):
        found |= _object(metadata.get(TEMPLATE_KWARGS), f"metadata.{TEMPLATE_KWARGS}")
        found |= _object(
            _object(metadata.get(EXTRA_BODY), f"metadata.{EXTRA_BODY}").get(TEMPLATE_KWARGS),
            f"{EXTRA_BODY}.{TEMPLATE_KWARGS}",
        )
    body = _object(fields.get(EXTRA_BODY), EXTRA_BODY)
    found |= _object(body.get(TEMPLATE_KWARGS), f"{EXTRA_BODY}.{TEMPLATE_KWARGS}")
    for column in reversed(TEMPLATE_COLUMNS):
        found |= _object(fields.get(column), column)
    if unknown := sorted(key for key in found if variables is not None and key not in variables):
        raise RowError(f"{TEMPLATE_KWARGS}.{unknown[0]}: the chat template has no such variable; correct or remove it")
    columns = {
        key: fields[key]
        for key in VARIABLES
        if fields.get(key) is not None and variables is not None and key in variables
    }
    return columns | found


def _object(value: object, name: str) -> Fields:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name} is a text that is not JSON: {error}") from error
    if not isinstance(value, dict | None):
        raise RowError(f"{name} must be an object, or one as JSON text, not {type(value).__name__}")
    return value or {}


def check_request(request: Fields, generation: GenerationConfig) -> None:
    """Raises RowError if a request to the Responses API, which mrl answers itself, asks for an unsupported feature."""
    metadata = request.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RowError("metadata of the request must be an object")
    beside = {key for key, value in metadata.items() if key.startswith("audio_") and value}
    beside |= {
        f"{EXTRA_BODY}.{key}"
        for key in _object(metadata.get(EXTRA_BODY), f"metadata.{EXTRA_BODY}")
        if key != TEMPLATE_KWARGS
    }
    if beside:
        raise RowError(f"metadata.{min(beside)} of the request has no effect here; remove it")
    for key, value in request.items():
        if value is None or key in (*REQUESTED, *WITHOUT_EFFECT) or value in NEUTRAL.get(key, ()):
            continue
        if key in SAMPLED:
            if value != (ours := getattr(generation, SAMPLED[key])):
                raise RowError(
                    f"the request has {key}={value}, and rollouts policy.generation.{key}={ours}; remove it, or "
                    "set that"
                )
        elif key == "max_output_tokens" and isinstance(value, int):
            if value < generation.max_new_tokens:
                ours = f"policy.generation.max_new_tokens={generation.max_new_tokens}"
                raise RowError(f"the request has {key}={value}, and rollouts may have {ours}; remove it, or lower that")
        else:
            raise RowError(f"{key} of the request has no effect here; remove it")


def check_asked(fields: Fields) -> None:
    """Raises RowError if a row of a prompt asks for rollouts that are sampled in a way of its own."""
    beside = [f"{EXTRA_BODY}.{key}" for key in _object(fields.get(EXTRA_BODY), EXTRA_BODY) if key != TEMPLATE_KWARGS]
    if asked := [*beside, *(key for key in OF_SAMPLING if fields.get(key))]:
        raise RowError(f"{asked[0]} has no effect here: all rollouts are sampled by policy.generation; remove it")


def check_prompt(messages: Sequence[Message], reply: Message | None) -> None:
    """Raises RowError if the row asks for a reply that goes on from words of its own."""
    last = reply if reply is not None else messages[-1]
    if key := next((key for key in CONTINUED if last.get(key) is True), None):
        raise RowError(
            f"the last message has {key}=true: rollouts do not go on from a message; remove it, and write it as "
            "the user's"
        )


def check_learned(fields: Fields, *, algorithm: str) -> None:
    """Raises RowError if a row says it is not to be learned, or only parts of it, in a way that is not honoured."""
    if algorithm == "rm" and fields.get(MARGIN) is not None:
        raise RowError(f"{MARGIN} has no effect on the loss here; remove it")
    if algorithm == "sft":
        for key in UNPAIRED:
            if _is_false(fields.get(key)) or (fields.get(key) == 0 and "completion" in fields):
                raise RowError(f"{key} is {fields[key]}: the row shows a reply that is not to be learned; remove it")
    for key, value in fields.items():
        words = _words(key)
        if not any(word.startswith(_ABOUT_LEARNING) for word in words):
            continue
        if isinstance(value, bool):
            is_excluded = value is any(word.startswith(_EXCLUDES[:4]) or word in _EXCLUDES for word in words)
        else:
            is_weight = any(word.startswith("weight") for word in words)
            is_excluded = ((key in MARKS or is_weight) and value == 0) or (isinstance(value, list) and len(value) > 0)
            is_excluded |= key == "mask" and isinstance(value, str) and value.casefold() not in ("user", "human")
        if is_excluded:
            raise RowError(
                f"{key} is {str(value)[:40]}, which leaves out all of the row, or tokens that mrl does not know; "
                "remove the row or it"
            )


def is_learned(message: Message, name: str) -> bool:
    """True if an assistant's message is learned, as its `MARKS` say. RowError: contradictory or unknown ones."""
    values = set[bool]()
    for key, value in message.items():
        if key in MARKS:
            if value not in (0, 1):
                raise RowError(f"{name}.{key} is {value!r:.40}; messages are learned (true or 1) or not (false or 0)")
            values.add(bool(value))
        elif any(word.startswith(_ABOUT_LEARNING) for word in _words(key)) or (key in UNPAIRED and _is_false(value)):
            raise RowError(
                f"{name}.{key} is no mark that mrl knows; use `weight`, 1 if the message is learned and 0 if not, "
                "or remove it"
            )
        elif (
            key in OTHER_THOUGHTS
            and value
            and not any(message.get(known) for known in ("reasoning_content", "reasoning", "thinking"))
        ):
            raise RowError(f"{name}.{key} would not be learned; give the thoughts as a text under reasoning_content")
    if values and message["role"] != "assistant" and True in values:
        raise RowError(
            f"{name} is of role {message['role']} and marked as learned; only messages of the assistant are; "
            "remove the mark"
        )
    if len(values) > 1:
        raise RowError(
            f"{name} has marks that contradict each other ({', '.join(key for key in MARKS if key in message)}); "
            "keep one"
        )
    return message["role"] == "assistant" and values != {False}


def _is_false(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.strip().casefold() == "false")


def _words(name: str) -> list[str]:
    return [word.casefold() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
