import pytest

from mrl.data.jsonl import RowError
from mrl.data.preferences import preference_of

QUESTION = {"role": "user", "content": "2+2="}
RIGHT, WRONG = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": [QUESTION], "chosen": "4", "rejected": "5"},
        {"context": [QUESTION], "completions": [{"rank": 0, "completion": [RIGHT]}, {"rank": 1, "completion": [WRONG]}]},
        {"context": [QUESTION], "completions": [{"rank": 3, "completion": [WRONG]}, {"rank": 2, "completion": [RIGHT]}]},
    ],
)
def test_the_preferred_conversation_comes_first(fields: dict[str, object]):
    chosen, rejected = preference_of(fields)
    assert (chosen.messages, rejected.messages) == ((QUESTION, RIGHT), (QUESTION, WRONG))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "q", "chosen": "a"}, "no key rejected"),
        ({"chosen": "a", "rejected": "b"}, "no key prompt"),
        ({"context": [QUESTION], "completions": [{"rank": 0, "completion": [RIGHT]}]}, "must be a list of two objects"),
        (
            {"context": [QUESTION], "completions": [{"rank": 0, "completion": [RIGHT]}, {"rank": 0, "completion": [WRONG]}]},
            "must be two different numbers",
        ),
        ({"context": [QUESTION], "completions": [{"rank": 0, "completion": []}, {"rank": 1, "completion": [WRONG]}]}, "completion must be"),
    ],
)
def test_rows_that_are_no_preference(fields: dict[str, object], reason: str):
    with pytest.raises(RowError, match=reason):
        preference_of(fields)
