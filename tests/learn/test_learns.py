# SPDX-License-Identifier: Apache-2.0
"""The quickstart as a user runs it: it learns and shows what the tutorials show."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from importlib.metadata import version

import pytest

from tests.faults.attempts import Attempt, lineage
from tests.learn.quickstart import Quickstart, run_quickstart
from tests.reading import read_page

pytestmark = pytest.mark.timeout(1800)

NUM = r"-?[\d.]+"
# Of the 160 of the quickstart: part "learning" takes all of them, with several seeds.
STEPS, LEARNED = 40, 0.5


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    return run_quickstart(tmp_path_factory.mktemp("quickstart"), overrides=[f"grpo.max_num_steps={STEPS}"])


def test_it_learns(quickstart: Quickstart):
    (first_step, before), *_, (last_step, after) = quickstart.accuracies
    print(f"held-out accuracy {before:.3f} -> {after:.3f} in {last_step} steps, {quickstart.seconds:.0f} s in all")
    assert (first_step, last_step) == (0, quickstart.last_step) == (0, STEPS)
    assert before <= 0.30
    assert after >= LEARNED


def test_the_console_shows_what_the_tutorials_show(quickstart: Quickstart):
    console, last = quickstart.console, quickstart.last_step
    assert re.search(r"^Config: /.*grpo_tiny\.yaml$", console, re.MULTILINE)
    assert re.search(r"^Number of actors online: 4/4$", console, re.MULTILINE)
    assert re.search(
        r"^Collecting rollouts: 100%\|█+\| (\d+)/\1 \[\d\d:\d\d<00:00, +[\d.]+it/s\]$", console, re.MULTILINE
    )
    for step in (1, last):
        block = re.search(rf"^=+ Step {step}/{last} =+$\n(.*\n){{6}}", console, re.MULTILINE)
        assert block, f"no block of step {step}: {console[-3000:]}"
        lines = [line for line in block[0].splitlines() if not line.startswith("Saving checkpoint")]
        patterns = [
            r"={24,26} Step \d+/\d+ ={24,26}",
            rf"\[Generate\] \d+ prompts x \d+ generations = \d+ responses \({NUM}s\)",
            rf"\[Reward\]   mean={NUM}, std={NUM}, min={NUM}, max={NUM}",
            rf"\[Train\]    loss={NUM}, grad_norm={NUM}",
            rf"\[Time\]     total={NUM}s \(gen={NUM}s, reward={NUM}s, train={NUM}s(, val={NUM}s)?(, ckpt={NUM}s)?\)",
            rf"\[Mrl\]      mean \|dlogp\|=[\d.e-]+ \(generator vs trainer\), token_mult_prob_error={NUM}, "
            rf"refit={NUM}s, verified=[\d,]+ bytes(, hidden: .*)?",
        ]
        for pattern, line in zip(patterns, lines, strict=False):
            assert re.fullmatch(pattern, line), line
    assert f"Saving checkpoint for step {last}..." in console


def test_the_run_folder_holds_what_was_promised(quickstart: Quickstart):
    folder = quickstart.run_folder
    assert (folder / "config.yaml").stat().st_size
    assert json.loads((folder / "about.json").read_text())["megatron-core"] == version("megatron-core")
    report = (folder / "report.html").read_text()
    (run,) = read_page(report)["runs"]
    assert run["series"]["val/accuracy"] and run["rollouts"] and "connect-src 'none'" in report
    assert list((folder / "logs").glob("exp_001/tensorboard/events.out.tfevents.*"))
    assert (folder / f"step_{quickstart.last_step}" / "policy" / "weights" / "iter_0000000" / ".metadata").exists()
    assert (folder / f"step_{quickstart.last_step}" / "policy" / "tokenizer" / "tokenizer.json").exists()
    row = quickstart.metrics[-1]
    names = (
        "train/reward",
        "train/loss",
        "train/grad_norm",
        "train/gen_kl_error",
        "train/token_mult_prob_error",
        "time/total",
    )
    assert row.keys() >= {"step", "val/accuracy", "refit/seconds", "refit/verified_bytes", *names}
    assert [row["step"] for row in quickstart.metrics] == list(range(quickstart.last_step + 1))


@pytest.mark.parametrize(
    "is_allowed", [False, pytest.param(True, marks=pytest.mark.long("learning"))], ids=["refused", "allowed"]
)
def test_other_data_are_refused_until_allowed(quickstart: Quickstart, is_allowed: bool):
    folder, other = quickstart.folder / "results" / "other_data", quickstart.folder / "other.jsonl"
    shutil.copytree(quickstart.run_folder, folder)
    rows = (quickstart.folder / "prepared/tiny/data/train.jsonl").read_text().splitlines()
    other.write_text("\n".join(rows[: len(rows) // 8]))
    last = quickstart.last_step + 1
    overrides = [
        f"checkpointing.checkpoint_dir={folder}",
        f"data.train.data_path={other}",
        f"grpo.max_num_steps={last}",
    ]
    with Attempt(folder, overrides, quickstart.folder / "refused.log", working_folder=quickstart.folder) as refused:
        assert refused.finish() == 2
    assert "checkpointing.allow_changes=[data]" in refused.text()
    if not is_allowed:
        return
    overrides += ["checkpointing.allow_changes=[data]"]
    with Attempt(folder, overrides, quickstart.folder / "allowed.log", working_folder=quickstart.folder) as allowed:
        assert allowed.finish() == 0, allowed.text()[-6000:]
    assert sorted(lineage(folder)) == list(range(1, last + 1))
    (dump,) = folder.glob(f"logs/exp_*/train_data_step{last}.jsonl.gz")
    asked = [json.loads(line)["content"][0] for line in gzip.decompress(dump.read_bytes()).splitlines()]
    questions = [json.loads(row)["question"] for row in other.read_text().splitlines()]
    assert len(asked) == 512
    assert all(any(question in text for question in questions) for text in asked)
