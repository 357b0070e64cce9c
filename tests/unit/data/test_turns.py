# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest

from mrl.config.texts import safe_text
from mrl.data.turns import TurnFormat, appended
from mrl.recipes.tokenizer import END_ID, byte_tokenizer
from mrl.types import Rollout, Turn, Verdict
from tests.rollouts import request

# Of the kind that Nemotron 3 and Qwen3 have: tools speak as users do, and thoughts of earlier turns are left out of a
# later prompt.
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "<|user|>\n<tool_response>{{ message['content'] }}</tool_response><|end|>\n"
    "{% else %}<|{{ message['role'] }}|>\n{{ message['content'].split('</think>')[-1] }}<|end|>\n{% endif %}{% "
    "endfor %}{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)


def spoken(tokens: list[int], prompt: list[int]) -> Rollout:
    return Rollout(request(prompt), 3, np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), "stop")


def chatml() -> TurnFormat:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = CHATML
    return TurnFormat(tokenizer, template_kwargs=None)


def ids(turns: TurnFormat, text: str) -> list[int]:
    return turns.tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered(turns: TurnFormat, messages: list[dict[str, str]]) -> str:
    return str(turns.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_a_conversation_is_what_the_template_makes_of_it_and_its_prefix_is_untouched():
    turns = TurnFormat(byte_tokenizer(4096), template_kwargs=None)
    messages = [{"role": "user", "content": "1+1="}]
    prompt = ids(turns, rendered(turns, messages))
    rollout = spoken([*b"two", END_ID], prompt)
    transcript = turns.go_on(rollout, [{"role": "user", "content": "in digits, please"}])
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "in digits, please"}]
    whole = ids(turns, rendered(turns, messages))
    assert [*prompt, *transcript.token_ids.tolist()] == whole
    assert transcript.token_ids[:4].tobytes() == rollout.token_ids.tobytes()
    assert transcript.generator_logprobs.tolist() == [-0.5] * 4 + [0.0] * (len(transcript.token_ids) - 4)
    assert transcript.turns == (Turn(0, 4, 3),)
    (conversation,) = turns.conversations(appended(transcript, spoken([*b"2", END_ID], prompt)))
    assert [said["role"] for said in conversation] == ["prompt", "assistant", "environment", "assistant"]
    assert (conversation[1]["content"], conversation[3]["content"]) == ("two", "2")
    # What readers see is the whole text that the template writes.
    assert conversation[0]["content"] == rendered(turns, messages[:1])
    assert conversation[2]["content"] == "<|user|>in digits, please<|assistant|>"


def test_what_was_generated_stays_although_the_template_would_write_it_otherwise():
    turns = chatml()
    # Two tokens that the tokenizer would write as one, and a thought that the template leaves out.
    generated = [*b"<think>hm</think>x", END_ID]
    transcript = turns.go_on(spoken(generated, [1]), [{"role": "tool", "content": "7"}])
    tail = "\n<|user|>\n<tool_response>7</tool_response><|end|>\n<|assistant|>\n<think>\n"
    assert transcript.token_ids.tolist() == generated + ids(turns, tail)


def test_a_rollout_ends_for_a_reason():
    turns, rollout = chatml(), spoken([*b"x", END_ID], [1])
    asked = Verdict(0.0, True, "ok", "", "", observation=({"role": "user", "content": "go"},))
    transcript = turns.go_on(rollout, asked.observation)
    room = 1 + len(transcript.token_ids) + 1

    def after(
        verdict: Verdict = asked, drawn: Rollout = rollout, *, max_turns: int = 2, max_model_len: int = room
    ) -> object:
        following = turns.next_turn(drawn, verdict, max_turns=max_turns, max_model_len=max_model_len)
        return following.token_ids.tolist() if isinstance(following, Rollout) else following

    assert after() == transcript.token_ids.tolist()
    assert after(replace(asked, observation=())) == "over"
    assert after(replace(asked, is_valid=False)) == "over"
    assert after(drawn=replace(rollout, finish_reason="length")) == "over"
    assert after(max_turns=1) == "over"
    # One token less, and none could be drawn; as in NeMo RL even if no turn were left.
    assert after(max_model_len=room - 1) == after(max_model_len=room - 1, max_turns=1) == "out of context"


def test_a_turn_that_ended_with_a_string_gets_the_mark_of_its_end():
    turns = chatml()
    tail = turns.tail_ids(ord("x"), [{"role": "user", "content": "go"}])
    assert tail == ids(turns, "<|end|>\n<|user|>\ngo<|end|>\n<|assistant|>\n<think>\n")
    assert turns.tail_ids(END_ID, [{"role": "user", "content": "go"}]) == tail[1:]


def test_a_later_turn_begins_as_the_prompts_own_values_say():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        SILENT + "{% if add_generation_prompt %}<|assistant|>{{ '' if thinks else '<think></think>' }}{% endif %}"
    )
    turns = TurnFormat(tokenizer, template_kwargs={"thinks": True})
    observed = [{"role": "user", "content": "go"}]
    assert turns.tail_ids(END_ID, observed) == ids(turns, "<|user|>go<|end|><|assistant|>")
    assert turns.tail_ids(END_ID, observed, '{"thinks": false}') == ids(
        turns, "<|user|>go<|end|><|assistant|><think></think>"
    )


def test_a_template_without_tools_hears_of_their_results_from_the_user():
    turns = TurnFormat(byte_tokenizer(4096), template_kwargs=None)
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert turns.tail_ids(END_ID, results) == ids(turns, "<|user|>1<|user|>2<|assistant|>")


# Of the kind that drops what it does not know.
SILENT = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>{% "
    "endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["environment", "function", "tool"])
def test_observations_of_roles_that_the_template_drops_are_the_users(role: str):
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = SILENT
    turns = TurnFormat(tokenizer, template_kwargs=None)
    assert turns.tail_ids(END_ID, [{"role": role, "content": "seen"}]) == ids(turns, "<|user|>seen<|end|>")
    with pytest.raises(ValueError, match="does not take the observation: it leaves message 1 of role judge out"):
        turns.tail_ids(END_ID, [{"role": "judge", "content": "1"}])


def test_a_turn_that_ended_with_another_mark_of_the_end_gets_no_second_one():
    """Covers Llama's, whose calls end with the end of a message, where its template writes the end of a turn."""
    tokenizer = byte_tokenizer(4096)
    other = 262  # <|reserved_0|>
    turns = TurnFormat(tokenizer, template_kwargs=None, end_ids=[END_ID, other])
    observation = [{"role": "user", "content": "go"}]
    assert (
        turns.tail_ids(other, observation)
        == turns.tail_ids(END_ID, observation)
        == ids(turns, "<|user|>go<|assistant|>")
    )
    # A stop that is no mark of the end leaves the turn open.
    assert turns.tail_ids(ord("x"), observation) == ids(turns, "<|end|><|user|>go<|assistant|>")


def test_an_observation_that_the_template_refuses_is_an_error():
    with pytest.raises(ValueError, match="does not take the observation"):
        TurnFormat(byte_tokenizer(4096), template_kwargs=None).tail_ids(END_ID, [{"role": "judge", "content": "1"}])


def test_texts_of_turns_are_without_the_environment_and_special_tokens():
    turns = chatml()
    turns.tokenizer.add_tokens(["</think>"], special_tokens=True)
    rollout = spoken([*ids(turns, "a</think>b"), END_ID], [1])
    second = turns.go_on(rollout, [{"role": "user", "content": "no"}])
    start = len(second.token_ids)
    tokens = np.concatenate([second.token_ids, np.array([*b"c", END_ID], np.int32)])
    whole = Rollout(rollout.request, 3, tokens, np.zeros(len(tokens), np.float32), "stop", None, second.turns, start)
    assert turns.texts(whole) == ("a</think>b", "c")


def test_texts_without_markup_are_what_the_tokenizer_itself_decodes():
    turns = TurnFormat(byte_tokenizer(4096), template_kwargs=None)
    tokens = np.random.default_rng(0).integers(0, 264, size=400).tolist()
    assert turns.texts(spoken(tokens, [1])) == (
        safe_text(str(turns.tokenizer.decode(tokens, skip_special_tokens=True))),
    )


def test_a_turn_is_appended_with_the_experts_that_each_token_was_drawn_with():
    # One layer, one expert per token. The engine computed the first tokens again, and chose otherwise.
    before = np.array([[[1]], [[2]], [[3]]], np.uint8)
    again = np.array([[[9]], [[9]], [[9]], [[4]], [[5]], [[6]]], np.uint8)
    earlier = Rollout(
        *(request([1, 2]), 3, np.array([10, 11, 12], np.int32), np.array([-1, -2, 0], np.float32), "stop", before),
        tail_length=1,
    )
    drawn = Rollout(request([1, 2]), 4, np.array([13, 14], np.int32), np.array([-3, -4], np.float32), "stop", again)
    rollout = appended(earlier, drawn)
    assert rollout.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert rollout.generator_logprobs.tolist() == [-1, -2, 0, -3, -4]
    assert rollout.routes is not None and rollout.routes.ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert len(rollout.routes) == 2 + 5 - 1
    assert rollout.turns == (Turn(0, 2, 3), Turn(3, 5, 4))
    assert rollout.num_weight_versions == 2
