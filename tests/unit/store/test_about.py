# SPDX-License-Identifier: Apache-2.0
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from conversion.reshard import reshard
from conversion.schedule import Schedule
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import redact_command
from mrl.store.about import MAX_CELLS, about_refit, about_this_attempt
from mrl.store.identity import code_changes
from tests.unit.conversion.test_reshard import HALVES, WHOLE


def matrix_of(schedule: Schedule) -> Sequence[Sequence[int]]:
    return cast("list[list[int]]", about_refit(schedule, verified_bytes=256, padding_bytes=8)["matrix"])


def test_a_refit_is_described_by_who_sends_what_to_whom():
    # A worker on the GPU of rank 0, which holds half of it, and one on a GPU of its own: 64 bytes a half.
    schedule = reshard(HALVES, {10: WHOLE, 11: WHOLE}, gpu_of={10: 0, 11: 2}, buffer_bytes=1 << 16)
    assert about_refit(schedule, verified_bytes=256, padding_bytes=8) == {
        "rounds": schedule.num_rounds,
        "num_ranks": 2,
        "num_workers": 2,
        "links": {"gpu": 64, "node": 192, "network": 0},
        "neighbours": 1,
        "matrix": [[64, 64], [64, 64]],
        "zero": {"verified_bytes": 256, "padding_bytes": 8},
    }


@pytest.mark.parametrize(
    ("count", "side"), [(MAX_CELLS, MAX_CELLS), (MAX_CELLS + 1, MAX_CELLS // 2 + 1), (3 * MAX_CELLS, MAX_CELLS)]
)
def test_neighbours_share_a_cell_of_a_large_matrix_and_no_byte_is_lost(count: int, side: int):
    workers = {100 + index: WHOLE for index in range(count)}
    schedule = reshard(
        {rank: WHOLE for rank in range(count)}, workers, gpu_of={100 + i: i for i in range(count)}, buffer_bytes=1 << 16
    )
    matrix = matrix_of(schedule)
    assert len(matrix) == len(matrix[0]) == side
    assert sum(map(sum, matrix)) == sum(schedule.link_bytes().values()) == 128 * count


def test_the_command_is_kept_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys, "orig_argv", ["/usr/bin/python3", "-m", "mrl.train", "grpo_tiny.yaml", "logger.wandb.notes=my canary"]
    )
    config = RunConfig()
    assert about_this_attempt(config)["command"] == "python -m mrl.train grpo_tiny.yaml 'logger.wandb.notes=my canary'"
    config.facts = replace(config.facts, secrets=frozenset({"my canary"}))
    assert "canary" not in str(about_this_attempt(config)["command"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "-m mrl.train grpo_tiny.yaml +grpo.max_num_steps=6 logger.wandb.name=run --check",
            "-m mrl.train grpo_tiny.yaml +grpo.max_num_steps=6 logger.wandb.name=run --check",
        ),
        (
            "loop.py grpo_tiny.yaml --lr 1e-3 -p canary -pcanary --db a:canary u=canary --creds=canary a.token=canary",
            "loop.py grpo_tiny.yaml --lr 1e-3 -p R R --db R u=R --creds=R a.token=R",
        ),
        ("-m mrl.train my.yaml algorithm=sft", "-m mrl.train my.yaml algorithm=sft"),
        ("-c import_canary", "-c R"),
    ],
)
def test_words_of_a_command_are_shown_only_if_they_are_known(words: str, expected: str):
    assert redact_command(["python", *words.split()]) == ["python", *expected.replace("R", "<redacted>").split()]


def test_changed_code_of_a_reward_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (source := tmp_path / "reward_of_about.py").write_text("def near(response): return 0.05")
    config, about = RunConfig(), tmp_path / "about.json"
    config.env.own.functions = {"near": "reward_of_about:near"}
    assert code_changes(about, config) == [], "the first attempt"
    about.write_text(json.dumps(about_this_attempt(config)))
    assert code_changes(about, config) == []
    source.write_text("def near(response): return 0.2")
    assert code_changes(about, config) == [
        "reward_of_about:near: its file, or one beside it that it loads, has changed"
    ]
    config.env.own.functions = {"far": "reward_of_about:far"}
    assert code_changes(about, config) == [], "a change of the config, which is said as that"
