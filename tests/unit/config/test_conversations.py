# SPDX-License-Identifier: Apache-2.0
from mrl.config.conversations import (
    MAX_CHARACTERS,
    MAX_CONVERSATIONS,
    MAX_MESSAGES,
    Heard,
    as_text,
    bounded,
    read_conversations,
    read_message,
)


def user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def answer(content: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


def contents(heard: Heard) -> list[list[str]]:
    return [[said["content"] for said in conversation] for conversation in heard.shown()]


def test_a_conversation_grows_although_thoughts_do_not_come_back():
    heard, first = Heard(), [{"role": "system", "content": "be short"}, user("1+1?")]
    heard.note([*first, answer("2", reasoning="easy")])
    heard.note([*first, answer("2"), user("and twice?"), answer("4")])
    assert contents(heard) == [["be short", "1+1?", "<think>easy</think>\n2", "and twice?", "4"]]


def test_a_second_try_a_sub_agent_and_another_past_are_conversations_of_their_own():
    heard = Heard()
    for messages in (
        [user("a"), answer("1")],
        [user("a"), answer("2")],
        [user("a"), answer("1"), user("more"), answer("3")],
        [user("sub"), answer("4")],
        [user("a, compacted"), answer("5")],
    ):
        heard.note(messages)
    assert contents(heard) == [["a", "1", "more", "3"], ["a", "2"], ["sub", "4"], ["a, compacted", "5"]]


def test_messages_of_each_protocol_are_read():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert read_message(answer("", tool_calls=[call])) == {
        "role": "assistant",
        "content": '[{"name": "add", "arguments": "{\\"a\\": 1}"}]',
    }
    parts = [{"type": "text", "text": "what is "}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert read_message({"role": "user", "content": parts})["content"] == "what is [image_url]"
    responses = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
    ]
    assert [(said["role"], said["content"]) for said in map(read_message, responses)] == [
        ("assistant", "<think>hm</think>"),
        ("assistant", '[{"name": "add", "arguments": "{}"}]'),
        ("tool", "3"),
        ("assistant", "three"),
    ]


def test_whatever_is_said_takes_bounded_room_and_its_end_is_kept():
    heard, messages = Heard(), list[dict[str, object]]()
    for turn in range(3 * MAX_MESSAGES):
        messages += [user(f"{turn} " + "x" * MAX_CHARACTERS), answer(f"said {turn}")]
        heard.note(messages)
    ((*shown,),) = heard.shown()
    assert len(shown) == MAX_MESSAGES + 1 and shown[-1]["content"] == f"said {3 * MAX_MESSAGES - 1}"
    assert shown[MAX_MESSAGES // 2] == {"role": "left out", "content": "320 messages"}
    assert sum(len(said["content"]) for said in shown) <= MAX_CHARACTERS
    for number in range(2 * MAX_CONVERSATIONS):
        heard.note([user(f"other {number}"), answer("y" * MAX_CHARACTERS)])
    assert len(heard.shown()) == MAX_CONVERSATIONS + 1 and heard.shown()[-1][0]["content"] == "9 conversations"
    assert sum(len(said["content"]) for one in heard.shown() for said in one) <= MAX_CHARACTERS


def test_short_messages_leave_their_room_to_long_ones():
    long = {"role": "tool", "content": "x" * 1000}
    ((short, cut),) = bounded([[{"role": "user", "content": "12345"}, long]], 205)
    assert short["content"] == "12345" and len(cut["content"]) in (199, 200)


def test_another_programs_file_and_a_terminals_escapes_do_no_harm():
    assert read_conversations(7, 100) == () == read_conversations({"a": 1}, 100)
    assert read_conversations([3, [4, {"role": 5, "content": ["\x1b[2J"]}]], 100) == (
        ({"role": "5", "content": "['\\x1b[2J']"},),
    )
    heard = Heard()
    heard.note([user("\x1b[2J\u202eabc"), "no message"])
    assert as_text(heard.shown()) == "[user]\n\ufffd[2J\ufffdabc\n[user]\nno message"
