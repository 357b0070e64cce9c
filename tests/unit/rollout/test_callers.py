# SPDX-License-Identifier: Apache-2.0
"""Questions of several gateways to one engine: each takes its own answers, and one that dies takes its questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mrl.rollout.callers import Answered, Callers, RemoteCallers


def test_each_gateway_takes_its_own_answers_and_a_new_process_drops_those_of_the_one_before():
    callers = Callers(num_slots=8)
    remote = RemoteCallers(callers, wake=lambda: None)
    params = cast(Any, SimpleNamespace(n=1, structured_outputs=None))

    def asked() -> list[str]:
        taken, _ = callers.take()
        for question in taken:
            callers.note(question, question.question_id, weight_version=0, num_refits=0)
        return [question.question_id for question in taken]

    def answered(question_id: str) -> bool:
        return callers.answer(cast(Any, SimpleNamespace(request_id=question_id)), num_refits=0)

    def taken(client: tuple[int, str]) -> list[str]:
        found = remote.take(client, 0.0)
        assert all(isinstance(answer, Answered) for _, answer in found)
        return [question_id for question_id, _ in found]

    remote.ask((0, "a"), [("a1", cast(Any, {}), params), ("a2", cast(Any, {}), params)], [])
    remote.ask((1, "b"), [("b1", cast(Any, {}), params)], [])
    assert asked() == ["a1", "a2", "b1"]
    assert answered("b1") and answered("a1")
    assert taken((0, "a")) == ["a1"] and taken((1, "b")) == ["b1"]
    # Another process in the first one's place: a2 has no asker any more, and the dead one's calls get nothing.
    remote.ask((0, "c"), [("c1", cast(Any, {}), params)], [])
    assert asked() == ["c1"]
    assert not answered("a2") and answered("c1")
    assert taken((0, "a")) == [] and taken((0, "c")) == ["c1"]
    # The other gateway's are still there.
    remote.ask((1, "b"), [("b2", cast(Any, {}), params)], [])
    remote.ask((0, "d"), [], [])
    assert asked() == ["b2"] and answered("b2") and taken((1, "b")) == ["b2"]
