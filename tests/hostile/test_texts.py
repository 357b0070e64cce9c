# SPDX-License-Identifier: Apache-2.0
"""Texts that break a report, a console or a file, from where they enter to where they are written; torn files."""

from __future__ import annotations

import io
import json
import logging
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.config.secrets import SecretsFormatter
from mrl.config.texts import MAX_TEXT_CHARACTERS, safe_text
from mrl.data.prompts import load_prompts
from mrl.data.turns import TurnFormat
from mrl.envs.scorer import MAX_EXTRACTED_CHARACTERS
from mrl.envs.task import Environment, Task
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.store.run_folder import RunFolder
from mrl.types import Prompt, Rollout, RolloutGroup, RolloutInfo, Verdict
from tests.reading import read_page
from tests.rollouts import request
from tests.unit.data.test_prompts import configured, write
from tests.unit.envs.pools import Pool
from tests.unit.store.test_run_folder import config
from tests.waiting import HANG_S

HOSTILE = {
    "NUL": "a\0b",
    "surrogate": "a\ud800b",
    "clear the screen": "a\x1b[2Jb",
    "title of the window": "a\x1b]0;owned\x07b",
    "8-bit control": "a\x9b31mb",
    "backspaces": "wrong\b\b\b\b\bright",
    "carriage return": "wrong\rright",
    "override": "a\u202eb\u202c",
    "isolate": "a\u2067b\u2069",
    "script": "</td><script>alert(1)</script>",
    "line separator": "a\u2028b\x85c\x0cd",
    "not a character": "a\ufffeb",
    "deep JSON": "[" * 100_000,
    "10 MB": "0123456789" * 1_000_000,
}
STEERS = [
    chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
]

every_text = pytest.mark.parametrize("text", list(HOSTILE.values()), ids=list(HOSTILE))
breaks = pytest.mark.attack("a text breaks a report or the console")


def is_safe(text: str) -> bool:
    text.encode("utf-8")
    return len(text) <= MAX_TEXT_CHARACTERS and not any(character in text for character in STEERS)


@breaks
@every_text
def test_texts_are_made_safe_once(text: str):
    made = safe_text(text)
    assert is_safe(made) and safe_text(made) == made
    assert made[:1] + made[-1:] == text[:1] + (text[-1:] if is_safe(text[-1:]) else "\ufffd")


def test_what_is_harmless_stays():
    text = 'tab\tnewline\nquotes "\\" ä€🙂 \u200eעברית\u200f \u0627 e\u0301 👩\u200d🔬 x²≤√2'
    assert safe_text(text) == text
    assert safe_text("a\r\nb\rc") == "a\nb\nc"
    assert safe_text("0123456789" * 3, 20) == "012345\n[cut]\n456789"


@breaks
@pytest.mark.parametrize("text", [text for text in HOSTILE.values() if len(text) < MAX_TEXT_CHARACTERS])
def test_what_a_model_writes_enters_safe_and_its_tokens_stay(text: str):
    ids = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
    rollout = Rollout(request([1]), 0, ids, np.zeros(len(ids), np.float32), "stop")
    before = ids.tobytes()
    (said,) = TurnFormat(byte_tokenizer(4096), template_kwargs=None).texts(rollout)
    assert is_safe(said) and rollout.token_ids.tobytes() == before


@breaks
def test_a_row_enters_safe_and_its_tokens_stay(tmp_path: Path):
    byte_tokenizer(4096).save_pretrained(tmp_path / "model")
    question = "\x1b[2J1+1\u202e"
    for name in ("train.jsonl", "validation.jsonl"):
        write(tmp_path / name, [{"question": question, "answer": "2\x1b]0;x\x07"}])
    (prompt,) = load_prompts(configured(tmp_path)).train
    assert is_safe(prompt.text) and is_safe(prompt.expected_answer)
    assert bytes(prompt.token_ids[1:-1]) == question.encode()


@breaks
@pytest.mark.parametrize("row_id", ["a\x1b[2J", "a\nb", "a\u202eb"])
def test_an_id_that_cannot_be_printed_is_a_bad_row(tmp_path: Path, row_id: str):
    byte_tokenizer(4096).save_pretrained(tmp_path / "model")
    for name in ("train.jsonl", "validation.jsonl"):
        write(tmp_path / name, [{"question": "1+1", "answer": "2", "id": row_id}])
    with pytest.raises(ValueError, match="cannot be printed") as caught:
        load_prompts(configured(tmp_path))
    assert is_safe(str(caught.value))


@breaks
def test_what_a_grader_says_again_is_safe():
    function = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:echo"})
    texts = [safe_text(text, 100_000) if len(text) > 100_000 else text for text in HOSTILE.values()]
    with Pool(replace(function, num_workers=2, timeout_s=HANG_S)) as pool:
        verdicts = pool.score([Task((text,)) for text in texts])
    for verdict in verdicts:
        assert verdict.status == "ok" and len(verdict.extracted) <= MAX_EXTRACTED_CHARACTERS
        said = [
            verdict.extracted,
            *verdict.components,
            *verdict.flags,
            *(message["content"] for message in verdict.observation),
        ]
        assert all(map(is_safe, said))


@breaks
def test_no_log_line_steers_the_terminal():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(SecretsFormatter())
    record = logging.LogRecord("x", logging.INFO, "x", 1, "Rollout %s", ("\x1b[2J\x1b]0;owned\x07\u202e",), None)
    handler.handle(record)
    assert is_safe(stream.getvalue())


def group_of(text: str) -> RolloutGroup:
    prompt = Prompt("p", (1,), safe_text(text), safe_text(text), "math")
    verdict = Verdict(1.0, True, "ok", safe_text(text, MAX_EXTRACTED_CHARACTERS), safe_text(text))
    return RolloutGroup(prompt, (RolloutInfo("0/p/0", "p", 0, 1, 1, 1, "stop", None),), (verdict,))


@breaks
def test_a_run_folder_of_hostile_samples_renders_its_report(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder, caplog.at_level(logging.INFO):
        folder.newest_checkpoint()
        for step, text in enumerate(HOSTILE.values(), start=1):
            folder.log_samples(step, "validation", [group_of(text)])
        folder.log_metrics(step, {"train/reward": 1.0})
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    (run,) = read_page(page)["runs"]
    assert len(run["samples"]) == len(run["dumps"]) == len(HOSTILE) and "<script>alert" not in page and is_safe(page)
    assert len((folder.path / "samples.jsonl").read_text().splitlines()) == len(HOSTILE)
    assert all(is_safe(record.getMessage()) for record in caplog.records)


@breaks
def test_a_text_that_came_past_the_gate_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """For whoever hands a verdict to the run folder that was not made safe."""
    raw = group_of("a")
    raw = replace(raw, verdicts=(replace(raw.verdicts[0], text="\ud800", extracted="\ud800"),))
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder:
        folder.newest_checkpoint()
        folder.log_samples(1, "train", [raw])
        folder.log_metrics(1, {"train/reward": 1.0})
    (run,) = read_page((folder.path / "report.html").read_text())["runs"]
    assert run["samples"][0]["text"] == "\ud800" and "cannot be written" not in caplog.text


@breaks
def test_a_disk_that_was_full_for_a_moment_costs_some_lines(tmp_path: Path):
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder:
        folder.newest_checkpoint()
        folder.log_samples(1, "train", [group_of("first")])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((folder.path / "samples.jsonl").stat().st_size + 40, hard))
        try:
            folder.log_samples(2, "train", [group_of("second")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        folder.log_samples(3, "train", [group_of("third")])
        folder.log_metrics(3, {"train/reward": 1.0})
    lines = (folder.path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 3 and [json.loads(line)["text"] for line in (lines[0], lines[2])] == ["first", "third"]
    (run,) = read_page((folder.path / "report.html").read_text())["runs"]
    assert run["samples"][-1]["text"] == "third" and run["num_torn"] == 1


@breaks
@pytest.mark.parametrize("torn", [b'{"step": 2, "te', b"\0" * 4096, b"\xff\xfe", b"[" * 100_000, b"7", b'{"step": 2}'])
def test_reports_survive_torn_lines(tmp_path: Path, torn: bytes):
    folder = RunFolder(config(tmp_path))
    folder.open()
    (folder.path / "samples.jsonl").write_bytes(torn)
    with folder:
        assert folder.newest_checkpoint() is None
        # What the start of the run has not dropped.
        (folder.path / "samples.jsonl").write_bytes(torn)
        folder.log_samples(3, "train", [group_of("whole")])
        folder.log_metrics(3, {"train/reward": 1.0})
    (run,) = read_page((folder.path / "report.html").read_text())["runs"]
    assert [sample["text"] for sample in run["samples"]] == ["whole"] and run["num_torn"] == 1
