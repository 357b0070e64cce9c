import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.envs.messages import encode, take_message

texts = st.text(alphabet=st.characters(codec=None, categories=None), max_size=50)


@given(st.lists(st.dictionaries(texts, texts, max_size=3), max_size=5), st.integers(1, 7))
def test_messages_arrive_whole_however_they_are_cut(messages: list[dict[str, object]], size: int):
    data = b"".join(encode(message) for message in messages)
    buffer, received = bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        while (message := take_message(buffer)) is not None:
            received.append(message)
    assert received == messages
    assert not buffer


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x00\x00\x00\x04junk", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x01\xff"])
def test_garbage_is_refused(data: bytes):
    with pytest.raises(ValueError):
        take_message(bytearray(data))
