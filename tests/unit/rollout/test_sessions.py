from __future__ import annotations

from mrl.rollout.sessions import Sessions, SessionTurn, said

HELLO = {"role": "user", "content": "hello"}
CALLS = [{"id": "x1", "function": {"name": "f", "arguments": "{}"}}]
CALLS = [{"id": "x1", "function": {"name": "f", "arguments": "{}"}}]
ANSWER = {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "hm"}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "x1"}


def turn(prompt: list[int], answer: list[int], *, is_continuation: bool = False) -> SessionTurn:
    return SessionTurn(prompt, answer, [-0.5] * len(answer), "stop", 3, 1, is_continuation)


def test_a_conversation_that_goes_on_keeps_its_tokens():
    sessions = Sessions()
    sessions.add("s", turn([1, 2], [3, 4]), [HELLO, ANSWER])
    sent_back = {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert sessions.sampled_ids("s", [HELLO, sent_back, RESULT]) == [1, 2, 3, 4]
    assert sessions.num_answered("s") == 2
    assert sessions.is_continuation("s", [1, 2, 3, 4, 5]) and not sessions.is_continuation("s", [1, 2, 3, 5])


def test_a_conversation_that_was_rewritten_does_not():
    sessions = Sessions()
    sessions.add("s", turn([1, 2], [3, 4]), [HELLO, ANSWER])
    other_call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "g", "arguments": "{}"}}]}
    for messages in ([HELLO], [HELLO, ANSWER], [{"role": "user", "content": "short"}, ANSWER, RESULT], [HELLO, other_call, RESULT]):
        assert sessions.sampled_ids("s", messages) is None
    assert sessions.sampled_ids("other", [HELLO, ANSWER, RESULT]) is None


def test_turns_are_told_in_order_and_forgotten():
    sessions = Sessions()
    sessions.add("s", turn([1], [2]), [])
    sessions.add("s", turn([1, 2, 3], [4], is_continuation=True), [])
    described = sessions.describe("s")
    assert described is not None and [one["token_ids"] for one in described] == [[2], [4]]
    assert described[1] == {
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4],
        "logprobs": [-0.5],
        "finish_reason": "stop",
        "weight_version": 3,
        "num_weight_versions": 1,
        "is_continuation": True,
    }
    sessions.forget("s")
    assert sessions.describe("s") is None


def test_the_session_that_was_used_longest_ago_makes_room():
    sessions = Sessions(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.add(name, turn([1], [2]), [HELLO])
    assert [sessions.describe(name) is not None for name in "abc"] == [True, False, True]


def test_messages_are_compared_by_what_they_say():
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert said(parts) == said(HELLO)
    assert said({"role": "assistant", "content": None}) == said({"role": "assistant", "content": "", "tool_calls": []})
