# SPDX-License-Identifier: Apache-2.0
"""The child's side of the socket, in this process."""

import json
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from mrl.envs.child import serve
from mrl.envs.task import LENGTH_BYTES, Outcome, Task, encode

texts = st.text(alphabet=st.characters(codec=None, categories=None), max_size=50)


def repeat(task: Task) -> Outcome:
    return Outcome(1.0, extracted="|".join((*task.turns, task.expected, task.prompt, task.row)))


@given(st.lists(st.tuples(texts, texts, texts, texts), max_size=5), st.integers(1, 7))
def test_tasks_arrive_whole_however_they_are_cut(tasks: list[tuple[str, str, str, str]], size: int):
    data = b"".join(encode([[turn], *others]) for turn, *others in tasks)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as answers:
        child = threading.Thread(target=serve, args=(theirs, repeat))
        child.start()
        for start in range(0, len(data), size):
            ours.sendall(data[start : start + size])
        ours.shutdown(socket.SHUT_WR)
        received = [json.loads(answers.read(int.from_bytes(answers.read(LENGTH_BYTES)))) for _ in tasks]
        child.join()
    assert [answer["extracted"] for answer in received] == ["|".join(task) for task in tasks]
