import json
from pathlib import Path

from mrl.store.samples import best_and_worst, sample_lines, write_step_data
from mrl.types import Prompt, RolloutGroup, RolloutInfo, TrainSequence, Verdict


def group_of(name: str, *rewards: float) -> RolloutGroup:
    prompt = Prompt(name, (1, 2, 3), f"question {name}", "42", "math")
    rollouts = tuple(RolloutInfo(f"0/{name}/{index}", name, index, 1, 3, 5, "stop", None) for index in range(len(rewards)))
    verdicts = tuple(Verdict(reward, reward >= 0, "ok", "", f"answer {name}{index}") for index, reward in enumerate(rewards))
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
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = [TrainSequence(rollout, 0.1 * index, index != 1) for index, rollout in enumerate(rollouts)]
    write_step_data(tmp_path, 7, "train", groups, sequences)
    write_step_data(tmp_path, 7, "validation", groups, [])
    rows = [json.loads(line) for line in (tmp_path / "train_data_step7.jsonl").read_text().splitlines()]
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
    }
    validation = [json.loads(line) for line in (tmp_path / "val_data_step7.jsonl").read_text().splitlines()]
    assert len(validation) == 4 and "advantages" not in validation[0]
