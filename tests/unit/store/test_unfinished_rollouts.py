# SPDX-License-Identifier: Apache-2.0
"""Groups that are not whole when an attempt ends: what the next one goes on with, and what stays on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mrl.store import rollout_files
from mrl.store.ledger import LedgerState
from mrl.store.records import read_record
from mrl.store.rollout_files import KeptFile, KeptRollouts
from mrl.types import Rollout, RolloutGroup, RolloutInfo, RolloutRequest, RunState, Turn
from tests.unit.store.test_rollout_files import CONDITIONS, SAMPLING, payloads, prompt, whole, written
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "INTERVAL_S", 0.01)


def begun(name: str, index: int, version: int, length: int, *, is_sampled: bool = False) -> RolloutInfo:
    """A rollout in its second turn, whose first came from the weights before."""
    request = RolloutRequest(name, index, 0, 2**62 + index, (1, 2), SAMPLING)
    tokens = np.arange(length, dtype=np.int32)
    finish_reason = "stop" if is_sampled else "abort"
    turns = (Turn(0, 2, version - 1),)
    one = Rollout(request, version, tokens, -tokens / np.float32(3), finish_reason, None, turns, 3, 2)
    return RolloutInfo.of(one, one)


def unfinished(name: str, version: int, length: int) -> RolloutGroup:
    """A group of three rollouts: one with a verdict, one without, and one that is not sampled to its end."""
    full = whole(name, version)
    rest = begun(name, 1, version + 1, 9, is_sampled=True), begun(name, 2, version + 1, length)
    return dataclasses.replace(
        full, rollouts=full.rollouts[:1], verdicts=full.verdicts[:1], num_generations=3, begun=rest
    )


class Attempt:
    """An attempt that begins at a step, with weights of version 5, and has these groups under way."""

    def __init__(self, folder: Path, *, step: int = 0, limit_bytes: float = 1e9, conditions: dict = CONDITIONS) -> None:
        self.folder, self.under_way = folder, list[RolloutGroup]()
        self.kept = KeptRollouts(
            folder,
            conditions,
            lag=1,
            limit_bytes=limit_bytes,
            unfinished_s=0.02,
            saves=lambda at: at > 0 and at % 3 == 0,
            pull=payloads,
            check_owner=lambda: None,
        )
        self.kept.watch(lambda weight_version: 0, lambda is_last: list(self.under_way))
        self.kept.start(step, 5, [])

    def lengths(self) -> dict[str, list[int]]:
        """Lengths of begun rollouts in the files, by prompt."""
        found = dict[str, list[int]]()
        for path in sorted(self.folder.glob("kept_*")):
            try:
                groups = read_record(path, KeptFile).groups
            except FileNotFoundError:  # replaced meanwhile
                return {}
            found |= {group.prompt.prompt_id: [one.length for one in group.begun] for group, _ in groups if group.begun}
        return found

    def write(self, *groups: RolloutGroup) -> None:
        self.under_way = list(groups)
        wanted = {group.prompt.prompt_id: [one.length for one in group.begun] for group in groups}
        wait_until(lambda: self.lengths() == wanted, "a write")


def test_the_next_attempt_gets_every_token_and_logprob(tmp_path: Path):
    first = Attempt(tmp_path)
    first.write(unfinished("a", 5, 4))
    first.write(unfinished("a", 5, 7), unfinished("b", 5, 6))
    first.kept.close()
    # One file holds them all, the newest.
    assert len(list(tmp_path.iterdir())) == 1
    for _ in range(2):  # an attempt that ends before its first write changes nothing
        second = Attempt(tmp_path)
        found, expected = second.kept.take(0, prompt("a")), unfinished("a", 5, 7)
        second.kept.close()
        assert found is not None and not found.is_kept and found.weight_version == 5
        assert (found.num_missing, found.num_unjudged, found.judged) == (2, 2, [0])
        # One token of either that is begun came from the environment.
        assert found.num_kept_tokens == expected.rollouts[0].num_trained + (9 - 1) + (7 - 1)
        assert found.verdicts == expected.verdicts
        for one, original in zip(found.begun, expected.begun, strict=True):
            assert dataclasses.replace(one, payload=None) == dataclasses.replace(original, payload=None)
            for name in ("token_ids", "generator_logprobs"):
                assert getattr(one.pulled, name).tobytes() == getattr(original.pulled, name).tobytes()
            assert (one.pulled.turns, one.pulled.request) == (original.pulled.turns, original.pulled.request)


def test_what_an_attempt_has_not_asked_for_yet_outlives_its_writes_and_what_it_has_is_replaced(tmp_path: Path):
    first = Attempt(tmp_path)
    first.write(unfinished("a", 5, 4), unfinished("b", 5, 4))
    first.kept.close()
    second = Attempt(tmp_path)
    assert second.kept.take(0, prompt("a")) is not None
    # Another is under way before the one that was taken.
    second.under_way = [unfinished("c", 5, 6)]
    wait_until(lambda: second.lengths() == {"a": [9, 4], "b": [9, 4], "c": [9, 6]}, "a write")
    second.under_way = [unfinished("a", 5, 8)]
    wait_until(lambda: second.lengths() == {"a": [9, 8], "b": [9, 4]}, "a write")
    # It gets whole: the file of whole groups is there before the other loses it.
    second.under_way = []
    second.kept.note(whole("a", 5))
    wait_until(lambda: len(list(tmp_path.glob("kept_*"))) == 2, "a write")
    second.kept.close()
    third = Attempt(tmp_path)
    a, b = third.kept.take(0, prompt("a")), third.kept.take(0, prompt("b"))
    third.kept.close()
    assert a is not None and a.is_kept and not a.begun and b is not None and [one.length for one in b.begun] == [9, 4]


def test_what_an_attempt_never_asks_for_goes_once_it_is_too_old(tmp_path: Path):
    first = Attempt(tmp_path)
    first.write(unfinished("a", 5, 4), unfinished("b", 5, 4))
    first.kept.close()
    second = Attempt(tmp_path)
    second.kept.follow(RunState(step=3, weight_version=8), LedgerState())
    second.kept.prepare(3, ends=False)
    second.kept.published(3)
    second.write(unfinished("c", 8, 6))
    second.kept.close()


def test_versions_are_those_of_the_attempt_and_groups_that_get_whole_are_kept(tmp_path: Path):
    """Tokens from the weights before a checkpoint, and from its own, as `grpo.oversample` leaves them."""
    first = Attempt(tmp_path, step=2)
    first.kept.follow(RunState(step=3, weight_version=6), LedgerState())
    first.write(unfinished("a", 5, 4))
    first.kept.close()
    second = Attempt(tmp_path, step=3)
    found = second.kept.take(0, prompt("a"))
    assert found is not None and found.weight_version == 4 and found.oldest_version == 4
    versions = [[turn.weight_version for turn in one.pulled.turns] for one in found.begun]
    assert versions == [[4, 5], [4, 5]] and [one.weight_version for one in found.begun] == [4, 4]
    # Whole now, and written with the step of its oldest weights.
    second.kept.note(whole("a", 4))
    wait_until(lambda: [at for path in tmp_path.glob("kept_*") for group, at in groups_in(path)] == [2, 2], "a write")
    second.kept.close()
    third = Attempt(tmp_path, step=4)
    assert third.kept.take(0, prompt("a")) is None  # too old by then
    third.kept.close()
    assert list(tmp_path.iterdir()) == []


def groups_in(path: Path) -> tuple[tuple[RolloutGroup, int], ...]:
    return read_record(path, KeptFile).groups


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"conditions": CONDITIONS | {"model": "c"}}, "1 not: sampled or judged with other model"),
        ({"step": 2}, "1 not: older than grpo.async_grpo.max_trajectory_age_steps allows at step 2"),
        ({}, "Rollouts among them that go on: 2, from "),
    ],
)
def test_what_is_too_old_or_of_other_settings_is_sampled_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict, said: str
):
    first = Attempt(tmp_path)
    first.write(unfinished("a", 5, 4))
    first.kept.close()
    caplog.set_level("INFO")
    second = Attempt(tmp_path, **options)
    assert (second.kept.take(0, prompt("a")) is not None) == (not options) and said in caplog.text
    second.kept.close()
    assert len(list(tmp_path.iterdir())) == (not options)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_named_and_its_rollouts_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    first = Attempt(tmp_path)
    first.write(unfinished("a", 5, 4))
    first.kept.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    second = Attempt(tmp_path)
    assert second.kept.take(0, prompt("a")) is None
    second.kept.close()
    assert f"{path} is damaged" in caplog.text and "asked again" in caplog.text


def test_only_weights_of_checkpoints_count_and_the_folder_has_its_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Attempt(tmp_path)
    # Checkpoints follow steps 3 and 6: a run that resumes at 3 has no use for what the weights of step 1 have begun.
    run.kept.follow(RunState(step=1, weight_version=6), LedgerState())
    run.under_way = [unfinished("a", 6, 4), unfinished("b", 5, 4)]
    wait_until(lambda: run.lengths() == {"b": [9, 4]}, "a write")
    run.kept._limit = 10
    run.under_way = [unfinished("b", 5, 5)]
    wait_until(lambda: "keep_rollouts_gb" in caplog.text, "a message")
    assert run.lengths() == {"b": [9, 4]}
    run.kept._limit = 1e9
    run.write(unfinished("b", 5, 6))
    run.kept.close()
    run.kept.published(3)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_writes_once_more(tmp_path: Path):
    asked, groups = list[bool](), [unfinished("a", 5, 4)]
    kept = KeptRollouts(
        tmp_path,
        CONDITIONS,
        lag=1,
        limit_bytes=1e9,
        unfinished_s=3600,
        saves=lambda at: True,
        pull=payloads,
        check_owner=lambda: None,
    )
    kept.watch(lambda weight_version: 0, lambda is_last: (asked.append(is_last), groups)[1])
    kept.start(0, 5, [])
    assert written(tmp_path) == []
    kept.write_last()
    assert written(tmp_path) == ["a"] and asked == [True]

    def silent(is_last: bool) -> list[RolloutGroup]:
        raise RuntimeError("no answer")

    kept.watch(lambda weight_version: 0, silent)
    kept.write_last()  # returns, and what is written stays
    kept.close()
    assert written(tmp_path) == ["a"]


def test_whole_groups_are_written_though_engines_do_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    attempt, asked = Attempt(tmp_path), list[bool]()
    attempt.kept._unfinished_s = 1e-9  # at each look there is something else to write

    def silent(is_last: bool) -> list[RolloutGroup]:
        asked.append(is_last)
        if len(asked) == 1:
            attempt.kept.note(whole("a", 5))
        raise RuntimeError("no answer")

    attempt.kept.watch(lambda weight_version: 0, silent)
    wait_until(lambda: len(asked) > 2, "two more looks")
    attempt.kept.close()
    assert written(tmp_path) == ["a"] and "no answer" in caplog.text
