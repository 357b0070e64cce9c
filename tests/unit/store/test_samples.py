# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.schema.logger import LoggerConfig
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.store.samples import (
    append_report_samples,
    best_and_worst,
    drop_old_step_data,
    sample_lines,
    token_row,
    token_rows,
    write_step_data,
)
from mrl.types import Prompt, RolloutGroup, RolloutInfo, TokenSample, TrainSequence, UntrainedTurn, Verdict


def group_of(name: str, *rewards: float) -> RolloutGroup:
    prompt = Prompt(name, (1, 2, 3), f"question {name}", "42", "math")
    rollouts = tuple(
        RolloutInfo(f"0/{name}/{index}", name, index, 1, 3, 5, "stop", None) for index in range(len(rewards))
    )
    verdicts = tuple(
        Verdict(reward, reward >= 0, "ok", "", f"answer {name}{index}") for index, reward in enumerate(rewards)
    )
    return RolloutGroup(prompt, rollouts, verdicts)


def test_the_best_the_worst_and_one_of_the_middle():
    groups = [group_of("a", 0.1, 0.9), group_of("b", 0.5, 0.3, 0.7)]
    assert [sample.reward for sample in best_and_worst(groups, 3)] == [0.9, 0.5, 0.1]
    assert [sample.reward for sample in best_and_worst(groups, 4)] == [0.9, 0.7, 0.3, 0.1]
    assert [sample.reward for sample in best_and_worst(groups, 9)] == [0.9, 0.7, 0.5, 0.3, 0.1]
    assert best_and_worst(groups, 0) == []


def test_samples_on_the_console():
    (first, last) = sample_lines(best_and_worst([group_of("a", 1.0)], 1), 5)
    assert first.splitlines()[1:] == [
        "Validation sample 1 of 1 at step 5",
        "Prompt: question a",
        "Rollout: answer a0",
        "Expected answer: 42",
        "Reward: 1",
    ]
    assert set(last) == {"-"}


def test_every_rollout_of_a_step_is_one_line_under_nemo_rls_names(tmp_path: Path):
    groups = [group_of("a", 1.0, -1.0), group_of("b", 0.5, 0.0)]
    failed = Verdict(-1.0, False, "crash", "", "answer a1", reason="no answer")
    groups[0] = replace(groups[0], verdicts=(groups[0].verdicts[0], failed))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = [TrainSequence(rollout, 0.1 * index, index != 1) for index, rollout in enumerate(rollouts)]
    write_step_data(tmp_path, 7, "train", groups, sequences, LoggerConfig())
    write_step_data(tmp_path, 7, "validation", groups, [], LoggerConfig())
    rows = rows_of(tmp_path / "train_data_step7.jsonl.gz")
    assert [row["idx"] for row in rows] == [0, 1, 2, 3]
    assert [row["advantages"] for row in rows] == [0.0, 0.1, 0.2, 0.1 * 3]
    assert [row["sample_loss_mask"] for row in rows] == [1.0, 0.0, 1.0, 1.0]
    assert rows[1] == {
        "content": ["question a", "answer a1"],
        "rewards": -1.0,
        "input_lengths": 8,
        "sample_loss_mask": 0.0,
        "advantages": 0.1,
        "idx": 1,
        "prompt_id": "a",
        "environment": "math",
        "reward_components": {},
        "finish_reason": "stop",
        "masked": "crash: no answer",
        "expected": "42",
        "extracted": "",
        "weight_version": 1,
        "num_turns": 1,
    }
    validation = rows_of(tmp_path / "val_data_step7.jsonl.gz")
    assert len(validation) == 4 and "advantages" not in validation[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_data_step7.jsonl.gz", "val_data_step7.jsonl.gz"]


def test_all_that_was_said_in_a_conversation_is_in_file_report_and_console(tmp_path: Path):
    said = [("system", "be short"), ("user", "1+1?"), ("assistant", "two"), ("tool", "no digit"), ("assistant", "2")]
    conversation = tuple({"role": role, "content": content} for role, content in said)
    group = group_of("a", 1.0, 0.0)
    talked = replace(group.verdicts[0], conversations=(conversation,))
    group = replace(group, verdicts=(talked, group.verdicts[1]))
    write_step_data(tmp_path, 7, "train", [group], [], LoggerConfig())
    first, second = rows_of(tmp_path / "train_data_step7.jsonl.gz")
    assert first["conversations"] == [list(conversation)] and "conversations" not in second
    assert first["content"] == ["question a", "answer a0"]
    append_report_samples(tmp_path / "samples.jsonl", 7, "train", [group])
    text = "\n".join(f"[{role}]\n{content}" for role, content in said)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["text"] == text
    lines = sample_lines(best_and_worst([group], 2), 7)[0].splitlines()
    assert [line.strip() for line in lines][3:-2] == ["Rollout:", *text.splitlines()]


def test_a_sampled_rollout_has_its_tokens_beside_its_text(tmp_path: Path):
    sample = TokenSample(
        [65, 66, 256], [0, 1, 1], [0, -0.5, -1.25], [0, -0.5, -1.5], [0, 2.0, 2.0], [0, 1, 0], [0, 0.5, 0.25]
    )
    row = token_row(sample, byte_tokenizer(64))
    write_step_data(tmp_path, 7, "train", [group_of("a", 1.0, 0.0)], [], LoggerConfig(), {"0/a/1": row})
    first, second = rows_of(tmp_path / "train_data_step7.jsonl.gz")
    assert "token_ids" not in first and second["token_ids"] == [65, 66, 256] and second["token_texts"][:2] == ["A", "B"]
    assert second["generation_logprobs"] == [0, -0.5, -1.25] and second["prev_logprobs"] == [0, -0.5, -1.5]
    assert second["token_entropies"] == [0, 0.5, 0.25]
    assert second["token_generated"] == [0, 1, 1] and second["token_special"][:2] == [0, 0]


def test_what_is_not_finite_is_null_as_pages_read_strict_json(tmp_path: Path):
    sample = TokenSample([65, 66], [0, 1], [0, -0.5], [0, -math.inf], [0, 2.0], [0, 1], [0, math.nan])
    row = token_row(sample, byte_tokenizer(64))
    assert json.loads(json.dumps(row, allow_nan=False))["prev_logprobs"] == [0, None] and row["token_entropies"] == [
        0,
        None,
    ]


def test_sequences_of_an_agent_have_their_tokens_and_say_what_is_not_trained(tmp_path: Path):
    sample = TokenSample([65, 66, 67], [0, 0, 1], [0, 0, -1.25], None, [0, 0, 2.0], [0, 0, 1], [0, 0, 0.25])
    group = group_of("a", 1.0)
    info = replace(group.rollouts[0], untrained=(UntrainedTurn(1, 2, "forced"),))
    rows = token_rows(
        [(info, sample), (group.rollouts[0], replace(sample, token_ids=[65, 68, 69]))], byte_tokenizer(64)
    )
    write_step_data(tmp_path, 7, "train", [group], [], LoggerConfig(), {"0/a/0": rows})
    (row,) = rows_of(tmp_path / "train_data_step7.jsonl.gz")
    assert row["token_ids"] == [65, 66, 67] and row["token_untrained"] == [[1, 2, "forced"]]
    assert [(other["token_ids"], other["token_untrained"]) for other in row["further"]] == [([65, 68, 69], [])]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_a_row_says_why_its_rollout_is_masked(tmp_path: Path):
    group = group_of("a", 1.0, 0.5, 0.0)
    judged = (
        group.verdicts[0],
        replace(group.verdicts[1], components={"format": 0.5}),
        Verdict(0.0, False, "crash", "", "", reason="gone"),
    )
    group = replace(group, verdicts=judged)
    sequences = [TrainSequence(rollout, 0.0, index == 0) for index, rollout in enumerate(group.rollouts)]
    write_step_data(tmp_path, 1, "train", [group], sequences, LoggerConfig())
    rows = rows_of(tmp_path / "train_data_step1.jsonl.gz")
    assert [row["masked"] for row in rows] == [None, "grpo.overlong_filtering", "crash: gone"]
    assert [row["reward_components"] for row in rows] == [{}, {"format": 0.5}, {}]


@pytest.mark.parametrize(("rollouts", "num_rows"), [("all", 12), ("sample", 8), ("none", None)])
def test_as_many_rollouts_as_wanted_are_written(tmp_path: Path, rollouts, num_rows: int | None):
    groups = [group_of(str(index), 1.0, 0.0) for index in range(6)]
    write_step_data(tmp_path, 1, "validation", groups, [], LoggerConfig(rollouts=rollouts))
    files = list(tmp_path.iterdir())
    assert [len(rows_of(path)) for path in files] == ([] if num_rows is None else [num_rows])


def test_texts_of_old_steps_go_in_all_attempts(tmp_path: Path):
    for name in ("exp_001", "exp_002"):
        (tmp_path / name).mkdir()
        for step in (3, 10, 11, 12):
            write_step_data(tmp_path / name, step, "train", [group_of("a", 1.0)], [], LoggerConfig())
    (tmp_path / "exp_001" / "notes.txt").touch()
    drop_old_step_data(tmp_path, 12, LoggerConfig())
    assert len(list(tmp_path.glob("*/*.gz"))) == 8
    drop_old_step_data(tmp_path, 12, LoggerConfig(rollouts_keep_steps=2))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    names = [f"{name}/train_data_step{step}.jsonl.gz" for name in ("exp_001", "exp_002") for step in (11, 12)]
    assert left == sorted([*names, "exp_001/notes.txt"])


def test_samples_of_the_report_are_short(tmp_path: Path):
    group = group_of("a", 1.0)
    long = replace(group, verdicts=(replace(group.verdicts[0], text="x" * 150_000),))
    append_report_samples(tmp_path / "samples.jsonl", 1, "train", [long] * 9)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 4 and all(len(line) < 1000 and json.loads(line)["text"] == "x" * 600 + " …" for line in lines)
