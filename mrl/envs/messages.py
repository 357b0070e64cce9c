"""What a reward child and its parent say to each other: JSON objects, each after its length. Standard library only."""

from __future__ import annotations

import json
import struct

MAX_MESSAGE_BYTES = 64 << 20
"""A rollout of a million tokens takes 4 MiB of text; a longer length is not a message of ours."""

_LENGTH = struct.Struct(">I")


def encode(message: dict[str, object]) -> bytes:
    """The bytes of one message.

    Raises:
        ValueError: it is too long.
    """
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def take_message(buffer: bytearray) -> dict[str, object] | None:
    """Removes the first whole message from `buffer` and returns it; None while it is not complete.

    Raises:
        ValueError: the bytes are not a message.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    message = json.loads(buffer[_LENGTH.size : end])
    del buffer[:end]
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {type(message).__name__}")
    return message
