# SPDX-License-Identifier: Apache-2.0
"""kill -9 in the middle of sampling, twice: unfinished rollouts go on, and the run ends as an undisturbed one."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from mrl.store.records import read_record
from mrl.store.rollout_files import KeptFile
from mrl.types import Rollout, RolloutInfo
from tests.faults.attempts import Attempt, lineage
from tests.faults.test_kill import rows, weights
from tests.stack.loop.conftest import SMALL, write_inputs

STEPS = 2
SETTINGS = [
    *SMALL,
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "checkpointing.save_period=1",
    "checkpointing.keep_unfinished_s=0.05",
    "logger.tensorboard_enabled=false",
    "logger.record_steps=10",
    # Two kills fall into the sampling of a step: a model that knows nothing hardly ever ends.
    "policy.generation.max_new_tokens=700",
    "++env.own.functions.coin=tests.long.coin:coin",
    "++env.own.functions.second=tests.long.coin:second",
    "data.default.env_name=coin",
    "cluster.cpu_units_per_node=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.expert_model_parallel_size=1",
]


Kept = dict[str, RolloutInfo]


def kept(run_folder: Path) -> tuple[Kept, Kept]:
    """Kept rollouts by request id: those with a verdict, and those without one of groups that are not whole."""
    judged, begun = Kept(), Kept()
    for path in sorted((run_folder / "rollouts").glob("kept_*.mrl")):
        with suppress(FileNotFoundError):  # replaced meanwhile
            groups = [group for group, _ in read_record(path, KeptFile).groups]
            judged |= {one.request_id: one for group in groups for one in group.rollouts}
            begun |= {one.request_id: one for group in groups for one in group.begun}
    return judged, {name: one for name, one in begun.items() if name not in judged}


def num_tokens(*found: Kept) -> int:
    return sum(one.num_generated for some in found for one in some.values())


def went_on(attempt: Attempt) -> tuple[int, int]:
    """Rollouts that an attempt says it went on with, and their tokens."""
    ((count, tokens),) = re.findall(r"Rollouts among them that go on: (\d+), from (\d+) tokens", attempt.text())
    return int(count), int(tokens)


def trained(run_folder: Path) -> dict[tuple[int, str], Rollout]:
    """The rollouts of the recorded steps, by step and request id."""
    from mrl.store.rollout_files import RecordedStep

    records = [read_record(run_folder / "recorded" / f"step_{step}.mrl", RecordedStep) for step in range(1, STEPS + 1)]
    return {
        (record.step, one.rollout.request_id): one.rollout.pulled
        for record in records
        for batch in record.batches
        for one in batch.sequences
    }


CASES = {
    "one turn": (50, []),
    # A turn that is cut off has no second: of some 260 tokens that are drawn, two end it.
    "two turns": (
        70,
        ["grpo.max_rollout_turns=2", "data.default.env_name=second", "policy.generation.stop_token_ids=[65,66]"],
    ),
    # The rollouts of both steps are under way.
    "dedicated engine": (50, ["policy.generation.colocated.enabled=false", "grpo.async_grpo.enabled=true"]),
}
"""Tokens that a rollout has between two kills, about, and settings."""


@pytest.mark.parametrize(
    "case", ["one turn", *(pytest.param(name, marks=pytest.mark.long("kills")) for name in CASES if name != "one turn")]
)
def test_unfinished_rollouts_survive_two_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str):
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    inputs, (length, keys) = write_inputs(tmp_path), CASES[case]

    def attempt(run: str, log: str) -> Attempt:
        folder = tmp_path / run
        settings = [*inputs, *SETTINGS, *keys, f"checkpointing.checkpoint_dir={folder}"]
        return Attempt(folder, settings, tmp_path / f"{run}-{log}.log")

    with attempt("unbroken", "only") as only:
        assert only.finish() == 0, only.text()[-4000:]
        assert kept(only.run_folder) == ({}, {})

    judged, left = Kept(), Kept()
    for kill in (1, 2):
        with attempt("broken", str(kill)) as current:
            least = num_tokens(judged, left) + 16 * length
            current.wait_until(lambda: num_tokens(*kept(current.run_folder)) >= least, f"tokens for kill {kill}")  # noqa: B023
            current.send(signal.SIGKILL, "driver")
            assert current.finish() == -signal.SIGKILL
            current.assert_nothing_survives()
        if left:  # the second attempt went on with all that the first had left
            assert went_on(current) == (len(left), num_tokens(left))
        before = judged | left
        judged, left = kept(current.run_folder)
        for name, one in before.items():
            later = (judged | left)[name]
            assert later.pulled.token_ids[: one.length].tobytes() == one.pulled.token_ids.tobytes()
    with attempt("broken", "last") as last:
        assert last.finish() == 0, last.text()[-4000:]
    assert went_on(last) == (len(left), num_tokens(left)) and len(left) > 1
    assert num_tokens(judged, left) >= 2 * 16 * length
    assert (max(one.num_turns for one in left.values()) == 2) == (case == "two turns")

    # Nothing that a step trains shows that it was ever disturbed.
    found, expected = trained(last.run_folder), trained(only.run_folder)
    assert found.keys() == expected.keys() and len(found) == STEPS * 16
    for key, rollout in found.items():
        for name in ("token_ids", "generator_logprobs"):
            assert getattr(rollout, name).tobytes() == getattr(expected[key], name).tobytes(), (key, name)
    assert lineage(last.run_folder) == lineage(only.run_folder)
    assert rows(last.run_folder) == rows(only.run_folder)
    assert weights(last.run_folder, tmp_path, STEPS) == weights(only.run_folder, tmp_path, STEPS)
