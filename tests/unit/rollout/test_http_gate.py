# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from mrl.rollout.http_gate import (
    NEUTRAL,
    Limits,
    default_parameters,
    find_deviation,
    find_excess,
    find_refusal,
    openai_error,
)
from mrl.types import SamplingParams

LIMITS = Limits(max_model_len=100, num_slots=8)

RUN = SamplingParams(temperature=0.9, top_p=0.95, top_k=None, max_new_tokens=64, stop_token_ids=(2,))
AS_ROLLOUTS = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, **{name: values[0] for name, values in NEUTRAL.items()}}


def test_a_request_gets_the_sampling_of_training_unless_it_says_otherwise():
    assert default_parameters(RUN) == {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 0,
        "max_tokens": 64,
        "stop_token_ids": [2],
    }


def test_sessions_are_drawn_as_rollouts_are():
    assert find_deviation(AS_ROLLOUTS, RUN) == ""
    assert find_deviation(AS_ROLLOUTS | {"top_k": -1, "bad_words": [], "logit_bias": {}}, RUN) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.0),
        ("top_p", 1.0),
        ("top_k", 5),
        ("n", 2),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("logit_bias", {"3": 1.0}),
        ("allowed_token_ids", [3]),
        ("min_tokens", 1),
        ("structured_outputs", object()),
    ],
)
def test_what_bends_the_distribution_keeps_a_request_out_of_a_session(name: str, value: object):
    assert find_deviation(AS_ROLLOUTS | {name: value}, RUN).startswith(
        f"{name}={value}: sessions are drawn as policy.generation says"
    )


def test_the_top_k_of_the_run_is_wanted_where_it_has_one():
    with_top_k = SamplingParams(temperature=0.9, top_p=0.95, top_k=20, max_new_tokens=64, stop_token_ids=(2,))
    assert find_deviation(AS_ROLLOUTS | {"top_k": 20}, with_top_k) == ""
    assert "top_k=0" in find_deviation(AS_ROLLOUTS, with_top_k)


def test_refusals():
    assert find_refusal({"prompt": [[1], [2]]}, LIMITS) == ""
    assert "not streamed" in find_refusal({"stream": True}, LIMITS)
    assert "beam" in find_refusal({"use_beam_search": True}, LIMITS)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 100 tokens.", "context_length_exceeded"),
        ("max_completion_tokens=200 cannot be greater than max_model_len=100", "context_length_exceeded"),
        ("the decoder prompt is longer than the maximum model length of 100", "context_length_exceeded"),
        (find_excess({"prompt": "x" * 1601}, LIMITS), "context_length_exceeded"),
        ("top_p must be in (0, 1]", 400),
    ],
)
def test_errors_have_openais_shape_and_code(message: str, code: str | int):
    error = json.loads(bytes(openai_error(400, message).body))["error"]
    assert (error["message"], error["code"], error["type"]) == (message, code, "invalid_request_error")


def test_refusals_name_keys_in_place_of_flags():
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    error = json.loads(bytes(openai_error(400, said).body))["error"]["message"]
    assert "--" not in error and "enable_auto_tools=true" in error and "tool_parser=NAME" in error
