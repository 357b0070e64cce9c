# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.check import describe_run
from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.data.order import count_steps, find_few_rows, num_steps_of, prompt_order
from mrl.data.prompts import load_prompts
from mrl.recipes.tokenizer import byte_tokenizer


def configured(folder: Path, num_rows: int, *overrides: str) -> RunConfig:
    byte_tokenizer(4096).save_pretrained(folder / "model")
    for name in ("train", "validation"):
        lines = [json.dumps({"question": f"{index}+1=", "answer": str(index + 1)}) + "\n" for index in range(num_rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    paths = [f"data.{name}.data_path={folder}/{name}.jsonl" for name in ("train", "validation")]
    return load_config(
        "grpo_tiny.yaml",
        [
            f"policy.model_name={folder / 'model'}",
            "grpo={num_prompts_per_step: 8, max_num_epochs: 1}",
            *paths,
            *overrides,
        ],
    )


@pytest.mark.parametrize(
    ("num_rows", "overrides", "is_enough"),
    [
        (7, [], False),
        (8, [], True),
        (4, ["grpo.max_num_epochs=2"], True),
        (4, ["data.train.repeat=2"], True),
        (20, ["data.train.max_samples=7"], False),
        (10, ["data.train.split_validation_size=3"], False),
        (15, ["data.train.split_validation_size=0.5"], False),
        (16, ["data.train.split_validation_size=0.5"], True),
        (1000, ["data.train.split_validation_size=0.5"], True),
    ],
)
def test_the_check_counts_the_rows_that_a_run_trains_on(
    tmp_path: Path, num_rows: int, overrides: list[str], is_enough: bool
):
    config = configured(tmp_path, num_rows, *overrides)
    num_kept = len(load_prompts(config).train)
    if is_enough:
        assert num_steps_of(config, num_kept) == config.grpo.max_num_epochs * num_kept // 8 >= 1
        assert find_few_rows(config) == []
        assert count_steps(config, most_rows=10_000) == num_steps_of(config, num_kept)
        assert count_steps(config, most_rows=1) in (None, num_steps_of(config, num_kept))
    else:
        with pytest.raises(ValueError, match=r"grpo.num_prompts_per_step=8: more than all rows"):
            num_steps_of(config, num_kept)
        assert f"more than all rows ({num_kept} times" in find_few_rows(config)[0]


def test_data_that_are_not_here_are_not_counted(tmp_path: Path):
    config = configured(tmp_path, 4, "data.train.data_path=openai/gsm8k")
    assert find_few_rows(config) == []


def test_a_step_asks_each_data_set_by_its_weight(tmp_path: Path):
    sets = f"{{data_path: {tmp_path}/train.jsonl, split_validation_size: 2, weight: 1}}"
    sets += f", {{data_path: {tmp_path}/large.jsonl, weight: 3}}"
    rows = [
        json.dumps({"id": f"large {index}", "question": f"{index}+2=", "answer": str(index + 2)}) for index in range(90)
    ]
    (tmp_path / "large.jsonl").write_text("\n".join(rows))
    config = configured(tmp_path, 10, f"data.train=[{sets}]")
    train = load_prompts(config).train
    order = prompt_order(config, train.sizes)
    steps = [[train.id_at(index) for _, index in order.at(8 * step, 8)] for step in range(12)]
    assert (train.sizes, [sum(name.startswith("large") for name in step) for step in steps]) == ((8, 90), [6] * 12)
    # Of the small set, less the two rows that are held out, the third epoch ends with the twelfth step.
    assert sorted(name for step in steps for name in step if not name.startswith("large")) == sorted(
        3 * [train.id_at(index) for index in range(8)]
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.num_prompts_per_step=40", "grpo.max_num_epochs=1"], " = 1 step, as the data have no more rows; valid"),
        (["grpo.num_prompts_per_step=100", "grpo.max_num_epochs=3"], " rows; a step asks rows more than once, as it "),
        (["grpo.num_prompts_per_step=32", "grpo.max_num_steps=2"], ""),
    ],
)
def test_few_rows_are_said_with_the_steps_that_they_make(workplace: Path, overrides: list[str], said: str):
    """64 rows, as the quickstart's config reads them."""
    (steps,) = [line for line in describe_run(load_config("grpo_tiny.yaml", overrides)) if line.startswith("steps ")]
    assert said in steps and ("more than once" in steps, "no more rows" in steps) == ("once" in said, bool(said))
