from __future__ import annotations

import pytest

from mrl.rollout.http_rules import (
    NEUTRAL,
    Limits,
    continued,
    default_parameters,
    find_deviation,
    find_refusal,
    num_messages_to_answer,
    take_prefix,
)
from mrl.types import SamplingParams

LIMITS = Limits(max_model_len=100, num_slots=8)

RUN = SamplingParams(temperature=0.9, top_p=0.95, top_k=None, max_new_tokens=64, stop_token_ids=(2,))
AS_ROLLOUTS = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, **{name: values[0] for name, values in NEUTRAL.items()}}


def test_a_request_gets_the_sampling_of_training_unless_it_says_otherwise():
    assert default_parameters(RUN) == {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "max_tokens": 64, "stop_token_ids": [2]}


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
    assert find_deviation(AS_ROLLOUTS | {name: value}, RUN).startswith(f"{name}={value}: sessions are drawn as policy.generation says")


def test_the_top_k_of_the_run_is_wanted_where_it_has_one():
    with_top_k = SamplingParams(temperature=0.9, top_p=0.95, top_k=20, max_new_tokens=64, stop_token_ids=(2,))
    assert find_deviation(AS_ROLLOUTS | {"top_k": 20}, with_top_k) == ""
    assert "top_k=0" in find_deviation(AS_ROLLOUTS, with_top_k)


def test_refusals():
    assert find_refusal({"prompt": [[1], [2]]}, LIMITS, session_id=None) == ""
    assert find_refusal({"prompt": [1, 2]}, LIMITS, session_id="s") == ""
    assert "one prompt" in find_refusal({"prompt": [[1], [2]]}, LIMITS, session_id="s")
    assert "not streamed" in find_refusal({"stream": True}, LIMITS, session_id=None)
    assert "beam" in find_refusal({"use_beam_search": True}, LIMITS, session_id=None)


def test_the_prefix_stands_in_the_request_or_with_the_last_message_that_has_one():
    messages = [
        {"role": "assistant", "content": "a", "prompt_token_ids": [1], "generation_token_ids": [2]},
        {"role": "assistant", "content": "b", "prompt_token_ids": [1, 2, 3], "generation_token_ids": [4], "generation_log_probs": [0.0]},
        {"role": "user", "content": "c"},
    ]
    plain = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert take_prefix({"messages": messages, "n": 1}) == ({"messages": plain, "n": 1}, [1, 2, 3, 4])
    assert take_prefix({"messages": messages, "required_prefix_token_ids": [9]}) == ({"messages": plain}, [9])
    assert take_prefix({"messages": plain}) == ({"messages": plain}, None)


@pytest.mark.parametrize("given", [[], [1, "2"], [-1], [True], "1", {}])
def test_a_prefix_that_is_no_token_ids_is_refused(given: object):
    with pytest.raises(ValueError, match="must be a list of token ids"):
        take_prefix({"messages": [], "required_prefix_token_ids": given})


def test_half_a_prefix_in_a_message_is_refused():
    with pytest.raises(ValueError, match="must be a list of token ids"):
        take_prefix({"messages": [{"role": "assistant", "prompt_token_ids": [1]}]})


def test_messages_up_to_the_answer():
    roles = ["user", "assistant", "tool", "assistant", "user"]
    assert num_messages_to_answer([{"role": role} for role in roles]) == 4
    assert num_messages_to_answer([{"role": "user"}]) == 0


# Prompt 11 12, answer " 4" in one token (220 17) or another (1001), end mark 2, newline 10, then a user's message 21 and the head 40.
def test_the_sampled_tokens_stay_and_the_template_goes_on_behind_its_end_mark():
    assert continued([11, 12, 220, 17, 2], [11, 12, 1001, 2, 10], [11, 12, 1001, 2, 10, 21, 2, 10, 40], {2}) == [
        *(11, 12, 220, 17, 2),
        *(10, 21, 2, 10, 40),
    ]


def test_an_answer_that_was_cut_off_gets_the_end_mark_of_the_template():
    assert continued([11, 220, 17], [11, 1001, 2], [11, 1001, 2, 21, 40], {2}) == [11, 220, 17, 2, 21, 40]


def test_another_stop_token_than_the_templates_stays():
    assert continued([11, 220, 3], [11, 1001, 2], [11, 1001, 2, 21, 40], {2, 3}) == [11, 220, 3, 2, 21, 40]


def test_thoughts_that_the_template_drops_from_earlier_turns_stay():
    # 70 71 are thoughts: written while the answer is the last message, left out behind it, so that positions shift.
    assert continued([11, 2, 70, 71, 5, 2], [11, 2, 70, 71, 5, 2], [11, 2, 5, 2, 21, 2, 40], {2}) == [11, 2, 70, 71, 5, 2, 21, 2, 40]


def test_a_template_without_end_marks_cannot_go_on():
    with pytest.raises(ValueError, match="without one of the tokens \\[2\\] behind each answer"):
        continued([11, 12], [11, 12], [11, 12, 13], {2})
