# SPDX-License-Identifier: Apache-2.0
"""`--check` reads rows, template, weight headers and run folder as a start: common mistakes, what it prints of each."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mrl import check
from mrl.config.load import load_config
from mrl.config.schema.run import CheckpointingConfig
from mrl.data.excerpts import MAX_WHOLE_ROWS, excerpt
from mrl.data.tables import chosen_rows, table_rows
from mrl.loop import examples
from mrl.ops import launch
from mrl.store.checkpoints import CheckpointStore
from mrl.store.ledger import Ledger
from mrl.store.ownership import Ownership
from mrl.store.run_folder import RunFolder
from mrl.types import RunState

MODEL, TRAIN = Path("prepared/tiny/model"), Path("prepared/tiny/data/train.jsonl")
PAIRS = Path("prepared/tiny/data/train_preferences.jsonl")


def write_rows(path: Path, row: Mapping[str, object], count: int = 64) -> None:
    path.write_text((json.dumps(row) + "\n") * count)


def write_checkpoint(run: Path, step: int) -> None:
    """A whole checkpoint of the policy, with the ledger that led to it."""
    checkpoints = CheckpointStore(run, CheckpointingConfig(save_period=1, keep_top_k=9))
    pending, ledger = checkpoints.begin(RunState(step=step)), Ledger(run / f"ledger-{step}.jsonl")
    for number in range(1, step + 1):
        ledger.take(number, [(0, f"train:{number}")])
        ledger.train(number, [(0, f"train:{number}")])
    ledger.copy_to(pending.ledger)
    ledger.copy_to(run / "ledger.jsonl")
    ledger.path.unlink()
    checkpoints.commit(pending, {})


@dataclass(frozen=True)
class Mistake:
    """A mistake of a newcomer, and the beginning of what `--check` says of it."""

    words: list[str]
    group: str
    said: str
    spoil: Callable[[], object] = lambda: None
    config: str = "grpo_tiny.yaml"


def without_template() -> None:
    path = MODEL / "chat_template.jinja"
    path.unlink(missing_ok=True)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (MODEL / "tokenizer_config.json").write_text(json.dumps(settings))


MISTAKES = {
    "wrong field names": Mistake(
        [],
        "Refused",
        f"data.train.data_path={TRAIN} has 64 bad rows among 64 rows that were looked at; correct them, "
        f"or name other rows there, as none will do:\n  {TRAIN}:1: no key question or problem or prompt or input "
        "(the row has 'ask', 'reply'); data.train.input_key names another",
        lambda: write_rows(TRAIN, {"ask": "1+1=", "reply": "2"}, 1200),
    ),
    "no chat template": Mistake(
        [], "Refused", f"policy.tokenizer.name={MODEL} has no chat template; use an", without_template
    ),
    "three missing files": Mistake(
        ["data.train.data_path=a.jsonl", "data.validation.data_path=b.jsonl", "policy.tokenizer.name=./c"],
        "To be provided",
        "policy.tokenizer.name=./c: no such folder in ",
    ),
    "a path that does not exist": Mistake(
        ["policy.model_name=./models/qwen"],
        "Not checked",
        "policy.model_name=./models/qwen: no readable config.json in this folder",
    ),
    "TRL's names": Mistake(
        ["learning_rate=1e-6"],
        "Refused",
        "learning_rate=1e-06 (command line): no such key; the nearest is policy.megatron_cfg.optimizer.lr",
    ),
    "preferences for GRPO": Mistake(
        [], "Refused", f"data.train.data_path={TRAIN} has 64 bad rows", lambda: shutil.copy(PAIRS, TRAIN)
    ),
    "questions for DPO": Mistake(
        [f"data.train.data_path={TRAIN}"],
        "Refused",
        f"data.train.data_path={TRAIN} has 64 bad rows; correct them, or name other rows there, as none will do:\n  "
        f"{TRAIN}:1: no key chosen (the row has 'agent_ref', 'answer', 'question'); it looks like a conversation "
        "with one reply, which algorithm=sft reads",
        config="dpo_tiny.yaml",
    ),
    "preferences for SFT": Mistake(
        [f"data.train.data_path={PAIRS}"],
        "Refused",
        f"data.train.data_path={PAIRS} has 64 bad rows; correct them, or name other rows there, as none will do:\n  "
        f"{PAIRS}:1: no message has the role assistant, so there is nothing to learn; it looks like a pair of "
        "replies, which algorithm=dpo and algorithm=rm read",
        config="sft_tiny.yaml",
    ),
    "rows of NeMo Gym without agent": Mistake(
        ["data.default.env_name=nemo_gym", "env.should_use_nemo_gym=true"],
        "Refused",
        (
            f"data.train.data_path={TRAIN} has 64 bad rows; correct them, or name other rows there, as none will do:"
            f"\n  {TRAIN}:1: no agent_ref"
        ),
        lambda: write_rows(TRAIN, {"responses_create_params": {"input": "1+1="}, "expected_answer": "2"}),
    ),
    "tools for agents without a parser": Mistake(
        [
            "data.default.env_name=nemo_gym",
            "env.should_use_nemo_gym=true",
            f"env.nemo_gym.command={sys.executable}",
            "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.enable_auto_tools=false",
        ],
        "Refused",
        (
            f"data.train.data_path={TRAIN}: rows of weather_simple_agent have tools, and engines refuse requests with "
            "tools; leave policy."
        ),
        lambda: write_rows(
            TRAIN,
            {
                "responses_create_params": {
                    "input": "hi",
                    "tools": [{"type": "function", "name": "look", "parameters": {}}],
                },
                "agent_ref": {"name": "weather_simple_agent"},
            },
        ),
    ),
    "answers that no reply can match": Mistake(
        [],
        "Warnings",
        (
            f"data.train.data_path={TRAIN}: no reply can be right in 64 of 64 rows that were judged, and they teach "
            "nothing; correct or remove"
        ),
        lambda: write_rows(TRAIN, {"question": "1+1=", "answer": "\\boxed{}"}),
    ),
    "rows that are too long for SFT": Mistake(
        ["policy.max_total_sequence_length=64", "policy.sequence_packing.train_mb_tokens=64"],
        "Warnings",
        f"data.train.data_path={TRAIN}: 64 of 64 rows that were looked at are too long and left out: {TRAIN}:1 (",
        lambda: write_rows(TRAIN, {"question": "1" * 99, "answer": "2"}, 1200),
        config="sft_tiny.yaml",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_newcomer_s_mistake_is_said_before_anything_starts(workplace: Path, mistake: Mistake):
    mistake.spoil()
    checked = check.examine(mistake.config, mistake.words)
    groups = {
        "Refused": list(map(str, checked.refused)),
        "Warnings": checked.doubts,
        "To be provided": list(map(str, checked.provided)),
        "Not checked": list(map(str, checked.unchecked)),
    }
    assert any(line.startswith(mistake.said) for line in groups[mistake.group]), groups


def test_a_wrong_name_of_the_environment_of_all_rows_is_one_fault(workplace: Path):
    checked = check.examine("grpo_tiny.yaml", ["data.default.env_name=maht"])
    (refused,) = map(str, checked.refused)
    assert refused.startswith("data.default.env_name=maht: no such environment; use math, the nearest of ")


def test_another_run_s_folder_is_refused_in_the_words_of_the_start(workplace: Path):
    """Model, tokenizer, data and algorithm of a run that has a checkpoint, each exchanged in turn."""
    sft = ["sft_tiny.yaml", f"data.train.data_path={TRAIN}", "data.validation=null", "checkpointing.checkpoint_dir=run"]
    sft += ["sft.val_period=0", "checkpointing.metric_name=null"]
    config = load_config(sft[0], sft[1:])
    training = examples.prepare(config)
    run = workplace / "run"
    with RunFolder(training.config, training.identity) as folder:
        folder.open()
        folder.note_attempt()
    write_checkpoint(run, 5)

    def look(*words: str) -> tuple[list[str], list[str]]:
        checked = check.examine(sft[0], [*sft[1:], *words])
        return list(map(str, checked.refused)), list(checked.doubts)

    def said_by_the_start(*words: str) -> list[str]:
        other = load_config(sft[0], [*sft[1:], *words])
        with pytest.raises(ValueError) as caught:
            found = examples.prepare(other)
            RunFolder(found.config, found.identity).open()
        return str(caught.value).splitlines()

    assert look() == ([], [])
    shutil.copytree(MODEL, "other")
    with Path("other/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    Path("other/tokenizer_config.json").write_text(Path("other/tokenizer_config.json").read_text() + " ")
    words = ["policy.model_name=other", "policy.tokenizer.name=other"]
    refused, _ = look(*words)
    assert refused == said_by_the_start(*words) and len(refused) == 2
    assert refused[0].startswith(
        "policy.model_name: the run resumes at step 5 with another model than before (model.safetensors differ)"
    )
    assert look(*words, "checkpointing.allow_changes=[model,tokenizer]")[0] == []
    write_rows(workplace / "rows.jsonl", {"question": "1+2=", "answer": "3"})
    refused, _ = look("data.train.data_path=rows.jsonl")
    assert refused == said_by_the_start("data.train.data_path=rows.jsonl") and refused[0].startswith(
        "data.train: the run resumes at step 5"
    )
    with Path("rows.jsonl").open("a") as rows:
        rows.write('{"question": }\n{"q": "1"}\n')
    (refused,) = look("data.train.data_path=rows.jsonl")[0]  # not once more by the comparison with the run
    assert "rows.jsonl has 2 bad rows; " in refused
    assert look("sft.seed=7")[0] == said_by_the_start("sft.seed=7")
    ppo = check.examine("ppo_tiny.yaml", ["checkpointing.checkpoint_dir=run"])
    assert any("holds no critic, and a run of algorithm=ppo resumes" in str(line) for line in ppo.refused)
    (run / "identity.json").write_text("{}")
    assert look()[0][0].startswith(f"{run}/identity.json is damaged")


def test_damaged_checkpoints_are_said_and_left_alone(workplace: Path):
    run = workplace / "results/grpo_tiny"
    for step in (5, 10):
        write_checkpoint(run, step)
    (run / "step_10/training_info.json").write_text("{}")
    before = sorted(path for path in run.rglob("*"))
    doubts = check.examine("grpo_tiny.yaml").doubts
    assert doubts[-1].startswith(
        "checkpointing.checkpoint_dir=results/grpo_tiny: a start passes over step_10: training_info.json has 2 bytes"
    )
    (run / "step_5/COMPLETE").unlink()
    refused = list(map(str, check.examine("grpo_tiny.yaml").refused))
    assert any(
        "none of its checkpoints is whole" in line and "step_10: training_info.json has 2 bytes" in line
        for line in refused
    )
    assert sorted(path for path in run.rglob("*")) == [path for path in before if path != run / "step_5/COMPLETE"]


def test_a_folder_in_use_is_refused_and_a_job_for_it_may_wait(workplace: Path, capsys: pytest.CaptureFixture[str]):
    run = workplace / "results/grpo_tiny"
    run.mkdir(parents=True)
    hold = Ownership(run / "owner.json")
    hold.take()
    try:
        (said,) = map(str, check.examine("grpo_tiny.yaml").refused)
        codes = [check.main(["grpo_tiny.yaml", check.OPTION]), launch.main(["slurm", "grpo_tiny.yaml"])]
    finally:
        hold.give_back()
    assert codes == [2, 0] and "Refused: 1" in capsys.readouterr().out
    assert check.main(["grpo_tiny.yaml", check.OPTION]) == 0
    assert said.startswith(f"checkpointing.checkpoint_dir=results/grpo_tiny is in use by process {os.getpid()} on ")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "tokenizer.json",
            '{"version": "1.0"',
            "policy.tokenizer.name=prepared/tiny/model: tokenizer.json cannot be read as a list of",
        ),
        (
            "tokenizer.json",
            "version https://git-lfs",
            "policy.tokenizer.name=prepared/tiny/model: tokenizer.json cannot be read as a list of",
        ),
        (
            "tokenizer_config.json",
            "[]",
            "policy.tokenizer.name=prepared/tiny/model: transformers finds no tokenizer there ('list' object",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": 5,}',
            "prepared/tiny/model/generation_config.json is not readable JSON: ",
        ),
        ("generation_config.json", "[]", "prepared/tiny/model/generation_config.json is not a JSON object"),
    ],
)
def test_damaged_files_of_a_model_are_named(workplace: Path, file: str, content: str, said: str):
    (workplace / MODEL / file).write_text(content)
    refused = list(map(str, check.examine("grpo_tiny.yaml").refused))
    assert refused and refused[0].startswith(said), refused


def test_strict_reads_every_row(workplace: Path):
    rows = [json.dumps({"question": "1+1=", "answer": "2"})] * 3 * MAX_WHOLE_ROWS
    rows[1234] = json.dumps({"question": "1+1="})
    TRAIN.write_text("\n".join(rows))
    loose = check.examine("grpo_tiny.yaml")
    assert not loose.refused
    assert (
        f"data.train: the other rows of {TRAIN}: only 64 were read, the first, the last and random ones" in loose.unseen
    )
    (refused,) = map(str, check.examine("grpo_tiny.yaml", is_strict=True).refused)
    assert f"{TRAIN}:1235: no key expected_answer or answer" in refused


def test_what_tries_a_reward_of_ones_own_is_named(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(workplace))
    Path("tried_reward.py").write_text("def judge(response): ...\n")
    own = ["++env.own.functions.mine=tried_reward:judge", "data.default.env_name=mine"]
    TRAIN.write_text('{"question": "1+1=", "answer": "2"}\n' * 64)
    said = f"data.train.data_path={TRAIN}: what the environment mine makes of replies; `python -m mrl.reward "
    assert f"{said}tried_reward:judge ROWS` tries it" in check.examine("grpo_tiny.yaml", own).unseen


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"{}"), "it is packed by gzip: let its name end in .gz"),
        (b"PAR1....", "it is a Parquet file: let its name end in .parquet"),
        ('{"question": "1"}'.encode("utf-16"), "it is text in UTF-16: save it as UTF-8"),
        (
            b"version https://git-lfs.github.com/spec/v1\nsize 3\n",
            "it is a pointer of Git LFS: fetch the file itself with `git lfs pull`",
        ),
        (b"\xef\xbb\xbf[\n {", "begins as a JSON array: let its name end in .json, or write one row a line"),
    ],
)
def test_files_of_another_format_are_told(workplace: Path, content: bytes, said: str):
    TRAIN.write_bytes(content)
    refused = list(map(str, check.examine("grpo_tiny.yaml").refused))
    assert len(refused) == 1 and refused[0].startswith(str(TRAIN)) and refused[0].endswith(said)


@pytest.mark.parametrize("form", ["jsonl", "crlf", "gz", "array", "parquet", "arrow"])
def test_the_rows_that_are_looked_at_are_those_of_the_file(tmp_path: Path, form: str):
    """First, last and random rows, each with its own number, against a list of all."""
    rows = [{"question": f"{number}", "nested": {"a": [number, None]}} for number in range(1, 5001)]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / {"gz": "rows.jsonl.gz", "array": "rows.json", "crlf": "rows.jsonl"}.get(form, f"rows.{form}")
    text = (
        "\ufeff" + "\r\n".join(lines)
        if form == "crlf"
        else f"[{', '.join(lines)}]"
        if form == "array"
        else "\n\n".join(lines)
    )
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    elif form == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    else:
        path.write_bytes(gzip.compress(text.encode()) if form == "gz" else text.encode())
    found = excerpt(path)
    numbers = [json.loads(record.line)["question"] for record in found.records]
    per_row = 2 if form in ("jsonl", "gz") else 1  # with blank lines between
    assert [str((record.number - 1) // per_row + 1) for record in found.records] == numbers
    assert (
        numbers[:3] == ["1", "2", "3"]
        and numbers[-1] == "5000"
        and 48 <= len(numbers) == len(set(numbers))
        and not found.is_whole
    )
    assert all(
        json.loads(record.line) == rows[int(number) - 1] for record, number in zip(found.records, numbers, strict=True)
    )


def test_chosen_rows_of_a_table_are_those_that_training_reads(tmp_path: Path):
    """Types that Arrow stores in a way of its own: JSON as text, structures, lists of them, nulls."""
    column = pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(), pyarrow.array([json.dumps({"n": n, "x": None}) for n in range(99)])
    )
    lists = pyarrow.array([[{"role": "user", "content": None if n % 3 else str(n)}] * (n % 4) for n in range(99)])
    table = pyarrow.table(
        {"tools": column, "messages": lists, "score": pyarrow.array([n / 7 for n in range(99)], pyarrow.float32())}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    read = [row for row, _ in table_rows(tmp_path / "rows.parquet")]
    chosen = [0, 5, 9, 10, 37, 98]
    assert list(chosen_rows(tmp_path / "rows.parquet", lambda count: chosen)) == [
        (index + 1, read[index]) for index in chosen
    ]


def test_a_model_without_tokenizer_is_said(workplace: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (MODEL / name).unlink()
    (provided,) = map(str, check.examine("grpo_tiny.yaml").provided)
    assert provided.startswith(f"policy.tokenizer.name={MODEL}: no tokenizer in this folder; put it there")


def test_rows_are_read_where_the_model_is_not(workplace: Path):
    """A login node that has the data alone."""
    write_rows(TRAIN, {"ask": "1+1="})
    checked = check.examine("grpo_tiny.yaml", ["policy.model_name=Org/Model"])
    assert any("no key question or problem" in str(line) for line in checked.refused)
    assert (
        "the chat template, and how many tokens rows have: the tokenizer Org/Model is not on this machine"
        in checked.unseen
    )


def test_a_missing_prompt_file_of_teachers_is_said_once(workplace: Path):
    shutil.copytree("prepared/tiny/data", "data")
    words = ["data.default.teacher_key=answer", "data.default.teacher_prompt_file=no.txt"]
    checked = check.examine("distillation_tiny.yaml", [*words, "data.train.datasets=[{data_path: data/train.jsonl}]"])
    said = [str(line) for line in (*checked.refused, *checked.provided) if "no.txt" in str(line)]
    assert len(said) == 1 and said[0].startswith("data.default.teacher_prompt_file=no.txt: no such file"), said
    assert "data.train.datasets[0]: the rows of data/train.jsonl, without no.txt" in checked.unseen


def test_following_the_advice_about_columns_mends_both_sets(workplace: Path):
    """Training and validation rows with columns of unlike names: each message names a key of its own set, until nothing
    is refused.
    """
    write_rows(TRAIN, {"aufgabe": "1+1=", "loesung": "2"}, 600)
    write_rows(Path("validation.jsonl"), {"frage": "1+2=", "resultat": "3"})
    columns = {"data.train": ("aufgabe", "loesung"), "data.validation": ("frage", "resultat")}
    words = [
        f"data.train.data_path={TRAIN}",
        "data.validation.data_path=validation.jsonl",
        "data.validation.dataset_name=GSM8K",
    ]
    advised = []
    while refused := check.examine("grpo_tiny.yaml", words).refused:
        for name, (question, answer) in columns.items():
            for key in re.findall(rf"{name}\.\w+_key(?= names)|{name}\.\w+=null", "\n".join(map(str, refused))):
                advised.append(key if "=" in key else f"{key}={question if key.endswith('input_key') else answer}")
        assert len(advised) < 9 and set(advised) - set(words), refused
        words = list(dict.fromkeys([*words, *advised]))
    assert set(advised) == {
        *("data.train.input_key=aufgabe", "data.train.output_key=loesung", "data.validation.dataset_name=null"),
        *("data.validation.input_key=frage", "data.validation.output_key=resultat"),
    }
