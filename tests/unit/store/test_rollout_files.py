# SPDX-License-Identifier: Apache-2.0
"""Rollouts that outlive an attempt: what the next one gets of them, what it must not use, and what stays on disk."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from mrl import env
from mrl.config.load import load_config
from mrl.loop.rollouts import open_kept, reviver
from mrl.store import rollout_files
from mrl.store.identity import conditions_of
from mrl.store.ledger import LedgerState
from mrl.store.rollout_files import KeptFile, KeptRollouts, RecordedStep, drop_kept, read_record, write_record
from mrl.types import (
    Batch,
    Flaw,
    Prompt,
    Proposals,
    Rollout,
    RolloutGroup,
    RolloutInfo,
    RolloutRequest,
    RunState,
    SamplingParams,
    Turn,
    Verdict,
)
from tests.unit.store.test_run_folder import config
from tests.unit.stories import as_story
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from mrl.cluster.rollouts import RolloutCollector
    from mrl.store.run_folder import RunFolder

SAMPLING = SamplingParams(0.7, 0.9, None, 8, (258,), ("stop",))
CONDITIONS = {"policy.generation.temperature": "a", "model": "b"}


def prompt(name: str) -> Prompt:
    return Prompt(name, (1, 2), "1+1=", "2", "math", '{"x": 1}')


def rollout(name: str, index: int, version: int) -> Rollout:
    request = RolloutRequest(name, index, 0, 2**62 + index, (1, 2), SAMPLING)
    values = np.random.default_rng(index).random(5).astype(np.float32)
    routes = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    tokens = np.arange(5, dtype=np.int32)
    return Rollout(request, version, tokens, -values, "stop", routes, (Turn(0, 2, version),), 3, 1, Proposals(1, 2, 3))


def whole(name: str, version: int) -> RolloutGroup:
    """A group of two rollouts, the second of two sequences."""
    sampled = [rollout(name, index, version) for index in range(3)]
    infos = [RolloutInfo.of(one, one) for one in sampled]
    verdict = Verdict(
        1.0, True, "ok", "2", "é", {"form": 0.5}, ("flag",), (Flaw("malformed_thinking", 1, 2),), ({"role": "user"},)
    )
    second = dataclasses.replace(infos[1], further=(dataclasses.replace(infos[2], place=1),))
    return RolloutGroup(
        prompt(name), (infos[0], second), (verdict, dataclasses.replace(verdict, reward=0.0)), num_generations=2
    )


def payloads(infos: Sequence[RolloutInfo]) -> list[Rollout]:
    return [info.pulled for info in infos]


def attempt(
    folder: Path,
    *,
    step: int = 0,
    lag: int = 1,
    consumed: Sequence[str] = (),
    conditions: dict[str, str] = CONDITIONS,
    limit_bytes: float = 1e9,
    period: int = 3,
) -> KeptRollouts:
    """An attempt that begins at a step, with weights of version 5, and saves every `period` steps."""
    saves, keys = (lambda at: at > 0 and at % period == 0), [(0, name) for name in consumed]
    found = KeptRollouts(
        folder, conditions, lag=lag, limit_bytes=limit_bytes, saves=saves, pull=payloads, check_owner=lambda: None
    )
    found.start(step, 5, keys)
    return found


def written(folder: Path) -> list[str]:
    files = [read_record(path, KeptFile) for path in folder.glob("kept_*")]
    return sorted(group.prompt.prompt_id for file in files for group, _ in file.groups)


def write(found: KeptRollouts, folder: Path, names: Sequence[str], version: int = 5) -> None:
    before = written(folder)
    for name in names:
        found.note(whole(name, version))
    wait_until(lambda: written(folder) == sorted([*before, *names]), "a write")


def earlier(folder: Path, *, step: int = 0, lag: int = 1) -> None:
    """An attempt that has kept group "a", and has ended."""
    first = attempt(folder, step=step, lag=lag)
    write(first, folder, ["a"])
    first.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "INTERVAL_S", 0.01)


def test_the_next_attempt_gets_every_byte_of_a_group(tmp_path: Path):
    earlier(tmp_path)
    second = attempt(tmp_path)
    group, expected = second.take(0, prompt("a")), whole("a", 5)
    assert group is not None and (group.weight_version, group.is_kept) == (5, True)
    assert second.take(0, prompt("a")) is None
    assert group.verdicts == expected.verdicts and group.prompt == expected.prompt and group.num_unjudged == 0
    found, originals = ([one for info in held.rollouts for one in info.sequences] for held in (group, expected))
    assert [dataclasses.replace(info, payload=None, further=()) for info in found] == [
        dataclasses.replace(info, payload=None, further=()) for info in originals
    ]
    assert [len(info.sequences) for info in group.rollouts] == [1, 2] and group.rollouts[1].further[0].is_further
    for one, original in zip(payloads(found), payloads(originals), strict=True):
        assert one.request == original.request and one.turns == original.turns
        for name in ("token_ids", "generator_logprobs", "routes"):
            array, other = getattr(one, name), getattr(original, name)
            assert array.dtype == other.dtype and array.tobytes() == other.tobytes() and array.shape == other.shape
    second.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 2}, "1 not: older than grpo.async_grpo.max_trajectory_age_steps allows at step 2"),
        ({"step": 1}, ""),
        ({"step": 0, "lag": 0}, ""),
        ({"conditions": CONDITIONS | {"model": "c"}}, "1 not: sampled or judged with other model"),
        ({"conditions": {"model": "b"}}, "1 not: sampled or judged with other policy.generation.temperature"),
        ({"consumed": ["a"]}, "-"),
    ],
)
def test_what_is_too_old_or_of_other_settings_is_not_used_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict, said: str
):
    earlier(tmp_path, lag=changes.get("lag", 1))
    caplog.set_level("INFO")
    second = attempt(tmp_path, **changes)
    group = second.take(0, prompt("a"))
    assert (group is not None) == (said == "") and said.strip("-") in caplog.text
    if group is not None:
        assert {info.weight_version for info in group.rollouts} == {5 - changes["step"]}
    else:
        assert written(tmp_path) == []
    second.close()


def test_rollouts_of_weights_that_are_rolled_back_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    earlier(tmp_path, step=6)
    caplog.set_level("INFO")
    second = attempt(tmp_path, step=3)
    assert second.take(0, prompt("a")) is None and "from weights after step 3, which are rolled back" in caplog.text
    second.close()
    assert written(tmp_path) == []


def test_what_is_rolled_back_stays_so_two_attempts_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_files, "INTERVAL_S", 1.0)  # both groups in one file
    first = attempt(tmp_path, step=10, lag=2, period=2)
    first.follow(RunState(step=11, weight_version=6), LedgerState())
    first.note(whole("a", 5))
    first.note(whole("b", 6))
    wait_until(lambda: written(tmp_path) == ["a", "b"], "a write")
    first.close()
    second = attempt(tmp_path, step=10, lag=2, period=2)  # makes step 11 anew
    second.close()
    assert written(tmp_path) == ["a"]
    third = attempt(tmp_path, step=12, lag=2, period=2)
    assert third.take(0, prompt("b")) is None and third.take(0, prompt("a")) is not None
    third.close()


def test_a_changed_prompt_is_asked_again_and_a_changed_teacher_is_not_asked_for_rollouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    earlier(tmp_path)
    second = attempt(tmp_path)
    taught = dataclasses.replace(prompt("a"), teacher="hinted", teacher_token_ids=(7, 8))
    group = second.take(0, taught)
    assert group is not None and group.prompt == taught
    second.close()
    third = attempt(tmp_path)
    assert third.take(0, dataclasses.replace(taught, expected_answer="3", row="{}")) is None
    assert "Prompt a has another expected_answer and row than when its rollouts were kept; it is asked" in caplog.text
    third.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "format", "folder"])
def test_a_damaged_file_is_said_and_costs_its_own_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str):
    first = attempt(tmp_path)
    write(first, tmp_path, ["a"])
    write(first, tmp_path, ["b"])
    first.close()
    path = tmp_path / "kept_000001.mrl"
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        at = len(content) - 3
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(
            {
                "flip": flipped,
                "cut": content[:-1],
                "empty": b"",
                "format": content.replace(b'"format": 2', b'"format": 1'),
            }[damage]
        )
    second = attempt(tmp_path)
    assert second.take(0, prompt("a")) is None and second.take(0, prompt("b")) is not None
    assert str(path) in caplog.text and "asked again" in caplog.text
    # New files take no name that is there.
    write(second, tmp_path, ["c"]) if damage != "folder" else None
    second.close()


def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path):
    path = tmp_path / "x.mrl"
    write_record(path, Turn(1, 2, 3))
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            assert read_record(path, Turn) == Turn(1, 2, 3), at  # a key of the header that nobody needs
        except ValueError:
            continue


def test_only_what_a_checkpoint_needs_is_written_and_stays(tmp_path: Path):
    """Lag 1, saves at 3 and 6: the groups from the weights of 0, and of 2 and 3, of 5 and 6."""
    run = attempt(tmp_path)
    run._steps.update({5 + step: step for step in range(8)})
    for step in (1, 4):
        run.note(whole(f"s{step}", 5 + step))
    write(run, tmp_path, ["s0"])
    write(run, tmp_path, ["s2"], version=7)
    write(run, tmp_path, ["s3"], version=8)
    run.note_trained(2, [(0, "s0")])
    run.note_trained(3, [(0, "s1")])
    run.prepare(3, ends=False)
    run.published(3)
    assert written(tmp_path) == ["s2", "s3"]
    run.note_trained(4, [(0, "s2")])
    run.published(3)  # the next checkpoint could fail: a run that resumes at 3 needs them
    assert written(tmp_path) == ["s2", "s3"]
    run.prepare(4, ends=True)  # a signal ends the run after step 4, of whose weights groups are whole
    assert written(tmp_path) == ["s2", "s3", "s4"]
    run.published(4)
    assert written(tmp_path) == ["s3", "s4"]
    run.published(6)
    assert written(tmp_path) == [] and list(tmp_path.glob(".*")) == []
    run.close()


def test_a_checkpoint_waits_for_what_it_needs_and_not_for_what_its_own_weights_can_sample_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Lag 1, a save after every step: groups of step 3's weights have no verdict, or are being written, at its save."""
    monkeypatch.setattr(rollout_files, "FLUSH_S", HANG_S)
    run, may_write, is_asked = attempt(tmp_path, period=1), threading.Event(), threading.Event()
    run._steps.update({5 + step: step for step in range(4)})
    write(run, tmp_path, ["s2"], version=7)

    def pull_later(infos: Sequence[RolloutInfo]) -> list[Rollout]:
        is_asked.set()
        assert may_write.wait(HANG_S)
        return payloads(infos)

    run._pull = pull_later
    run.watch(lambda weight_version: int(weight_version >= 8))
    run.note(whole("s3", 8))
    assert is_asked.wait(HANG_S)
    run.prepare(3, ends=False)
    assert written(tmp_path) == ["s2"]
    run.watch(lambda weight_version: 0)
    threading.Timer(0.05, may_write.set).start()
    run.prepare(3, ends=True)
    assert written(tmp_path) == ["s2", "s3"]
    run.close()


def test_a_full_folder_and_a_lost_payload_cost_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    small = attempt(tmp_path, limit_bytes=10)
    small.note(whole("a", 5))
    wait_until(lambda: "keep_rollouts_gb" in caplog.text, "a message")
    small.note(whole("b", 5))
    small.prepare(0, ends=True)  # waits for nothing that cannot be written
    assert written(tmp_path) == [] and caplog.text.count("some rollouts are not kept") == 1
    small._limit = 1e9
    write(small, tmp_path, ["c"])  # later there is room
    small.published(0)

    def lost(infos: Sequence[RolloutInfo]) -> list[Rollout]:
        small._pull = payloads
        raise RuntimeError("an engine has died")

    small._pull = lost
    small.note(whole("d", 5))
    small.prepare(0, ends=True)
    assert caplog.text.count("some rollouts are not kept") == 2 and "an engine has died" in caplog.text
    write(small, tmp_path, ["e"])
    small.close()
    assert written(tmp_path) == ["c", "e"]


def test_a_file_system_without_an_answer_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def hang(*_: object) -> int:
        raise TimeoutError("write of kept_000001.mrl")

    monkeypatch.setattr(rollout_files, "write_record", hang)
    found = attempt(tmp_path)
    found.note(whole("a", 5))
    wait_until(lambda: "rollouts are not kept any more" in caplog.text, "a message")
    monkeypatch.undo()
    found.note(whole("b", 5))
    found.prepare(0, ends=True)
    found.close()
    assert written(tmp_path) == [] and caplog.text.count("kept any more") == 1


def test_no_part_of_a_file_stays_and_an_attempt_that_keeps_nothing_leaves_nothing(tmp_path: Path):
    (tmp_path / ".kept_000007.mrl.0123").write_bytes(b"half")
    first = attempt(tmp_path)
    assert list(tmp_path.iterdir()) == []
    write(first, tmp_path, ["a"])
    first.close()
    (tmp_path / ".kept_000002.mrl.0123").write_bytes(b"half")
    drop_kept(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["kept:1", "kept:2"])
def test_a_kill_before_or_after_the_write_leaves_a_whole_file_or_none(tmp_path: Path, point: str):
    def child() -> None:
        env.PASSED.clear()
        os.environ[env.MRL_KILL_AT.name] = point
        run = attempt(tmp_path)
        run.note(whole("a", 5))
        run._thread.join(HANG_S)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HANG_S)
    assert process.exitcode == -signal.SIGKILL
    for _ in range(2):
        second = attempt(tmp_path)
        assert (second.take(0, prompt("a")) is not None) == (point == "kept:2")
        second.close()


def test_conditions_are_digests_of_what_changes_a_rollout_or_its_verdict(tmp_path: Path):
    identity, base = {"model": {"w": "1"}}, config(tmp_path)

    def changed(change) -> set[str]:
        other = dataclasses.replace(
            base, policy=dataclasses.replace(base.policy, generation=dataclasses.replace(base.policy.generation))
        )
        other.env, other.grpo = dataclasses.replace(base.env), dataclasses.replace(base.grpo)
        change(other)
        before, after = conditions_of(base, identity), conditions_of(other, identity)
        return {key for key in before if before[key] != after[key]}

    assert changed(lambda run: setattr(run.policy.generation, "temperature", 0.5)) == {"policy.generation.temperature"}
    assert changed(lambda run: setattr(run.policy.generation, "num_cpu_engines", 3)) == set()
    assert changed(lambda run: setattr(run.grpo, "num_generations_per_prompt", 99)) == {
        "grpo.num_generations_per_prompt"
    }
    assert changed(lambda run: setattr(run.env, "math", dataclasses.replace(run.env.math, strict=True))) == {"env.math"}
    assert changed(lambda run: setattr(run.env, "math", dataclasses.replace(run.env.math, num_workers=7))) == set()
    assert conditions_of(base, {"model": {"w": "2"}})["model"] != conditions_of(base, identity)["model"]


def test_keys_of_fp8_are_conditions_only_with_it(tmp_path: Path):
    """Else the rollouts that an earlier version has kept, without them, would be asked again."""
    run, key = config(tmp_path), "policy.generation.vllm_cfg.num_first_layers_in_bf16"
    assert key not in conditions_of(run, {})
    run.policy.generation.vllm_cfg.precision = "fp8"
    assert key in conditions_of(run, {})


def test_what_other_code_of_the_users_has_judged_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "code").mkdir()
    rewards, helper, stranger = (tmp_path / "code" / f"kept_{name}.py" for name in ("rewards", "helper", "stranger"))
    rewards.write_text(
        "from kept_helper import one\n\ndef mine(prompt, response, reference_answer):\n    return one()\n"
    )
    helper.write_text("def one():\n    return 1.0\n")
    stranger.write_text("")
    run = config(tmp_path)
    run.env = dataclasses.replace(
        run.env, own=dataclasses.replace(run.env.own, functions={"mine": "kept_rewards:mine"})
    )

    def conditions() -> dict[str, str]:
        return conditions_of(run, {})

    first, key = conditions(), "code of kept_rewards:mine"
    stranger.write_text("changed = True")
    assert conditions() == first
    for file in (rewards, helper):
        before = conditions()
        file.write_text(file.read_text() + "# other\n")
        assert {name for name, value in conditions().items() if value != before[name]} == {key}
    # The same by another spelling of the path; an agent's code counts as well.
    run.env.own.functions, run.env.own.agents = {}, {"mine": "kept_rewards.mine"}
    assert conditions()["code of kept_rewards.mine"] and key not in conditions()


@pytest.mark.parametrize("setting", ["checkpointing.keep_rollouts_gb=0", "checkpointing.enabled=false"])
@as_story
async def test_a_run_that_keeps_nothing_neither_writes_nor_reads(tmp_path: Path, setting: str):
    earlier(tmp_path / "rollouts")
    run, collector = load_config("grpo_tiny.yaml", [setting]), SimpleNamespace(on_whole=None)
    async with open_kept(
        run, cast("RunFolder", SimpleNamespace(path=tmp_path)), {}, cast("RolloutCollector", collector), last_step=9
    ) as found:
        assert found is None and collector.on_whole is None and written(tmp_path / "rollouts") == []
        assert reviver(found)(0, prompt("a")) is None


@pytest.mark.parametrize("metrics", [{}, {"train/prefix_sharing": 1.5}])
def test_records_of_every_version_say_whether_rows_share_prefixes(tmp_path: Path, metrics: dict[str, float]):
    batch = Batch(sequences=(), rows=(), logprob_rows=(), num_valid_tokens=0, num_valid_sequences=0, metrics=metrics)
    write_record(tmp_path / "step.mrl", RecordedStep(1, 0, "", (batch,), ({},), {}, ""))
    (read,) = read_record(tmp_path / "step.mrl", RecordedStep).batches
    assert read.shares_prefixes == bool(metrics)
