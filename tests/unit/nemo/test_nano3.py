# SPDX-License-Identifier: Apache-2.0
"""A blend in the published schema, with placeholders of both kinds, and what each row must become."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mrl.nemo.nano3 import prepare_nano3
from mrl.ops.prepare import main
from tests.sources import ROOT
from tests.waiting import wait_until

DAPO, SKYWORK = "nano_v3_sft_profiled_dapo17k", "nano_v3_sft_profiled_skywork_no_omni"
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
BEHIND = '\n\nRemember to put your answer on its own line after "Answer:".'
MATH = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
MCQA = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}


def placeholder(dataset: str, row: int, template: dict[str, str], **fields: object) -> dict[str, object]:
    return {
        "responses_create_params": {"input": []},
        "agent_ref": MATH,
        "dataset": dataset,
        "_hf_placeholder": {"row": row, "question_template": template},
        **fields,
    }


def asked(content: str, agent: dict[str, str], **fields: object) -> dict[str, object]:
    return {"responses_create_params": {"input": [{"role": "user", "content": content}]}, "agent_ref": agent, **fields}


PREFIX, SUFFIX = {"prefix": "Think, then box it."}, {"suffix": "Box it."}
SKYWORK_TEMPLATE = {"template": "Q: {question} Box {it}."}
BLEND = [
    asked("A or B?", MCQA, expected_answer="B", options=[{"A": "x"}, {"B": "ä\ud800"}], _hf_placeholder=None),
    placeholder(DAPO, 1, PREFIX, pass_rate=0.5),
    placeholder(DAPO, 0, SUFFIX),
    placeholder(SKYWORK, 2, SKYWORK_TEMPLATE, uuid="u"),
    asked("1+1?", MATH, expected_answer="2"),
]
FILLED = [
    asked("A or B?", MCQA, expected_answer="B", options=[{"A": "x"}, {"B": "ä\ud800"}]),
    asked(
        "Think, then box it.\n\nWhat is 2+2?", MATH,
        dataset=DAPO, pass_rate=0.5, question="Think, then box it.\n\nWhat is 2+2?", expected_answer="4",
    ),
    asked("\n\nWhat is 1+1?\n\nBox it.", MATH, dataset=DAPO, question="\n\nWhat is 1+1?\n\nBox it.",
          expected_answer="2"),
    asked("Q: What is 5+5? Box {it}.", MATH, dataset=SKYWORK, uuid="u", question="What is 5+5?", expected_answer="10"),
    asked("1+1?", MATH, expected_answer="2"),
]  # fmt: skip


def write_blend(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_origins(folder: Path) -> list[Path]:
    """DAPO-Math-17k as a table in two files, Skywork-OR1 with its two splits."""
    dapo, skywork = folder / "DAPO-Math-17k", folder / "Skywork-OR1-RL-Data"
    problems = [("What is 1+1?", "2"), ("What is 2+2?", "4"), ("What is 3+3?", "6")]
    rows = [
        {"prompt": [{"role": "user", "content": BEFORE + question + BEHIND}], "reward_model": {"ground_truth": answer}}
        for question, answer in problems
    ]
    (dapo / "data").mkdir(parents=True)
    for index, part in enumerate((rows[:1], rows[1:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), dapo / "data" / f"dapo-math-17k-{index}.parquet")
    (skywork / "data").mkdir(parents=True)
    sums = [
        {"prompt": [{"content": f"What is {n}+{n}?"}], "reward_model": {"ground_truth": json.dumps([str(2 * n), "?"])}}
        for n in (3, 4, 5)
    ]
    for split, content in (("math", sums), ("code", sums[:1])):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(content), skywork / "data" / f"{split}-00000-of-00001.parquet"
        )
    return [dapo, skywork]


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().decode("utf-8", "surrogatepass").splitlines()]


def test_placeholders_are_filled_in_and_the_last_rows_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sources = [write_blend(tmp_path / "blend", BLEND), *write_origins(tmp_path)]
    command = ["nano3", "--source", *map(str, sources), "--out", str(tmp_path / "out"), "--validation-rows", "2"]
    assert main(command) == 0
    train, validation = tmp_path / "out" / "train-split.jsonl", tmp_path / "out" / "val-split.jsonl"
    assert rows_of(train) + rows_of(validation) == FILLED
    assert len(rows_of(validation)) == 2
    said = capsys.readouterr().out
    assert "Rows to train on: 3, for validation: 2" in said
    assert (
        "4 rows (80.0 %) of math_with_judge_simple_agent: math" in said
        and "1 rows (20.0 %) of mcqa_simple_agent: mcqa" in said
    )
    assert "2 problems of BytedTsinghua-SIA/DAPO-Math-17k filled in" in said
    # A second call finds everything there; a folder above all of them is a source, too.
    before = train.stat().st_mtime_ns
    assert main(command) == 0 and train.stat().st_mtime_ns == before
    prepare_nano3([tmp_path], tmp_path / "again", num_validation=2)
    assert (tmp_path / "again" / "train-split.jsonl").read_bytes() == train.read_bytes()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (placeholder("other", 0, PREFIX), "train.jsonl:1: a placeholder of dataset=other, which is not known"),
        (
            placeholder(DAPO, -1, PREFIX),
            "train.jsonl:1: _hf_placeholder must have row and question_template.prefix or .suffix",
        ),
        (placeholder(SKYWORK, 0, PREFIX), "must have row and question_template.template"),
        (placeholder(DAPO, 3, PREFIX), r"DAPO-Math-17k in .* ends at row 2; the blend asks for row 3"),
        (
            asked("", MATH, responses_create_params={"input": []}),
            "train.jsonl:1: responses_create_params.input must be",
        ),
    ],
)
def test_rows_that_cannot_be_filled_in(tmp_path: Path, row: dict[str, object], reason: str):
    sources = [write_blend(tmp_path / "blend", [row, *BLEND]), *write_origins(tmp_path)]
    with pytest.raises(ValueError, match=reason):
        prepare_nano3(sources, tmp_path / "out", num_validation=2)
    assert not (tmp_path / "out" / "train-split.jsonl").exists()


def test_sources_that_are_missing_or_other_than_they_were(tmp_path: Path):
    blend, origins = write_blend(tmp_path / "blend", BLEND), write_origins(tmp_path)
    with pytest.raises(
        ValueError, match="the blend has placeholders of BytedTsinghua-SIA/DAPO-Math-17k \\(2\\), and no --source has"
    ):
        prepare_nano3([blend, origins[1]], tmp_path / "out", num_validation=2)
    with pytest.raises(ValueError, match="no train.jsonl of nvidia/Nemotron-3-Nano-RL-Training-Blend"):
        prepare_nano3(origins, tmp_path / "other", num_validation=2)
    with pytest.raises(ValueError, match="has 5 rows; --validation-rows 5 would leave none"):
        prepare_nano3([blend, *origins], tmp_path / "none", num_validation=5)
    prepare_nano3([blend, *origins], tmp_path / "done", num_validation=2)
    with pytest.raises(ValueError, match="was made of another blend, or with another --validation-rows"):
        prepare_nano3([blend, *origins], tmp_path / "done", num_validation=1)
    with pytest.raises(ValueError, match="is not empty"):
        prepare_nano3([blend, *origins], blend, num_validation=2)
    reworded = [{"prompt": [{"content": "What is 1+1?"}], "reward_model": {"ground_truth": "2"}}] * 3
    for path in (origins[0] / "data").iterdir():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(reworded), path)
    with pytest.raises(ValueError, match="train.jsonl:2: the problem is not worded as in DAPO-Math-17k"):
        prepare_nano3([blend, *origins], tmp_path / "reworded", num_validation=2)


def test_what_was_begun_is_continued(tmp_path: Path):
    sources = [write_blend(tmp_path / "blend", BLEND), *write_origins(tmp_path)]
    prepare_nano3(sources, tmp_path / "out", num_validation=2)
    train = tmp_path / "out" / "train-split.jsonl"
    whole = train.read_bytes()
    lines = whole.splitlines(keepends=True)
    # A line that no run of ours wrote shows that whole lines are kept; the torn one is written again.
    train.unlink()
    (tmp_path / "out" / ".train-split.jsonl.part").write_bytes(b'{"kept": 1}\n' + lines[1][:9])
    prepare_nano3(sources, tmp_path / "out", num_validation=2)
    assert train.read_bytes() == b'{"kept": 1}\n' + b"".join(lines[1:])


def test_a_killed_run_is_finished_by_the_next(tmp_path: Path):
    rows = [asked(f"{index}?" + "x" * 3000, MATH, expected_answer=str(index)) for index in range(5_000)]
    sources = [write_blend(tmp_path / "blend", rows)]
    command = [
        sys.executable,
        "-m",
        "mrl.prepare",
        "nano3",
        "--source",
        str(sources[0]),
        "--out",
        str(tmp_path / "out"),
    ]
    part = tmp_path / "out" / ".train-split.jsonl.part"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_until(
            lambda: (part.exists() and part.stat().st_size > 1 << 20) or process.poll() is not None,
            "part",
            longest_pause_s=0.001,
        )
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    assert 1 << 20 < part.stat().st_size < 12_000_000
    prepare_nano3(sources, tmp_path / "out", num_validation=1000)
    assert not part.exists()
    written = b"".join((tmp_path / "out" / name).read_bytes() for name in ("train-split.jsonl", "val-split.jsonl"))
    assert written == (tmp_path / "blend" / "train.jsonl").read_bytes()


def test_memory_does_not_grow_with_the_blend(tmp_path: Path):
    row = json.dumps(asked("x" * 10_000, MATH, expected_answer="2"))
    (tmp_path / "blend").mkdir()
    (tmp_path / "blend" / "train.jsonl").write_text((row + "\n") * 1500)
    tracemalloc.start()
    prepare_nano3([tmp_path / "blend"], tmp_path / "out", num_validation=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The blend has 15 MB.
    assert peak < 4 << 20
