# SPDX-License-Identifier: Apache-2.0
"""Folders and checkpoints not of the run: refused and left alone, by `--check` too, and the named way out works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.files.reading import sha256_file
from mrl.store.checkpoints import find_damage, is_damaged
from mrl.store.ledger import replay
from mrl.store.marks import MARK, find_mark, find_run, find_strangers, left_by_kills, remove_marked
from mrl.store.resuming import look_at_folder
from mrl.store.run_folder import METRICS, RunFolder
from tests.unit.loop.test_saving import Attempt
from tests.unit.store.test_kill_points import run
from tests.unit.store.test_run_folder import config

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run folder of two steps, both saved."""
    (tmp_path / "mine/model").mkdir(parents=True)
    run(tmp_path / "mine", 2)
    return tmp_path / "mine/run"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The run folder of another run with equal prompts, of another learning rate, say."""
    (tmp_path / "other/model").mkdir(parents=True)
    run(tmp_path / "other", 3)
    return tmp_path / "other/run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checked(folder: Path) -> list[str]:
    return list(map(str, look_at_folder(config(folder.parent), [], is_strict=False).problems))


def assert_refused(folder: Path, *said: str) -> None:
    """Two starts and `--check` refuse a folder, and change nothing in it."""
    before, names = content(folder), sorted(folder.rglob("*"))
    for _ in range(2):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            run(folder.parent, 1)
        for text in (*said, str(folder)):
            assert text in str(caught.value)
        assert checked(folder) == [str(caught.value)]
    assert content(folder) == before and sorted(folder.rglob("*")) == names


def assert_goes_on(folder: Path, first: int) -> None:
    for step in (first, first + 1):
        assert checked(folder) == []
        assert sorted(run(folder.parent, 1).folder.ledger.state.trained) == list(range(1, step + 1))
        assert find_damage(folder / f"step_{step}") is None
    assert len({mark.run for path in folder.glob("step_*") if (mark := find_mark(path))}) == 1


def nemo_rl(folder: Path, step: int) -> None:
    """A checkpoint as NeMo RL lays it out."""
    weights = folder / f"step_{step}/policy/weights/iter_0000000"
    weights.mkdir(parents=True)
    (weights / "__0_0.distcp").write_bytes(b"shard")
    (folder / f"step_{step}/training_info.json").write_text(
        json.dumps({"step": step, "consumed_samples": 1, "val_reward": 0.5})
    )
    (folder / f"step_{step}/config.yaml").write_text("grpo: {}")


def of_nemo_rl(folder: Path) -> None:
    for step in (20, 40):
        nemo_rl(folder, step)
    (folder / "tmp_step_60/policy").mkdir(parents=True)
    (folder / "tmp_step_60/mine").touch()


def holding(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of another program")

    return make


OTHERS = {
    "step_20, step_40, tmp_step_60": of_nemo_rl,
    "iter_0000020": holding("iter_0000020/common.pt"),
    "latest_checkpointed_iteration.txt": holding("latest_checkpointed_iteration.txt"),
    "global_step_20": holding("global_step_20/actor/model_world_size_1_rank_0.pt"),
    "checkpoint-500": holding("checkpoint-500/model.safetensors"),
    "step-100": holding("step-100/.metadata"),
    "epoch=3-step=100.ckpt": holding("epoch=3-step=100.ckpt"),
    "global_step100": holding("global_step100/mp_rank_00_model_states.pt"),
    # Named by their weights: OpenRLHF, Orbax, NeMo, Composer, ms-swift.
    "_actor": holding("_actor/global_step50/mp_rank_00_model_states.pt"),
    "100": holding("100/default/manifest.ocdbt"),
    "default--loss=0.5-epoch=1-samples=9-last": holding(
        "default--loss=0.5-epoch=1-samples=9-last/weights/__0_0.distcp"
    ),
    "ep0-ba50-rank0.pt": holding("ep0-ba50-rank0.pt"),
    "v0-20260102-101010": holding("v0-20260102-101010/checkpoint-50/model.safetensors"),
    "step_7": holding("step_7/COMPLETE"),
    **{
        name: holding(name)
        for name in ("config.yaml", "metrics.jsonl", "ledger.jsonl", "run.json", "owner.json", "loggers.json")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path, name: str):
    (tmp_path / "model").mkdir()
    (folder := tmp_path / "run").mkdir()
    OTHERS[name](folder)
    assert_refused(
        folder, f"mrl did not write {name}. mrl leaves", "choose another folder, or move that out of this one"
    )
    # The way out.
    folder.rename(tmp_path / "theirs")
    assert_goes_on(folder, 1)


def test_what_mrl_has_not_marked_is_never_removed(folder: Path):
    for name in (
        "tmp_old_datasets/precious.txt",
        "tmp_old_step_7/mine",
        "step_50_notes/mine",
        "step_007/mine",
        "tmp_step_x/mine",
    ):
        holding(name)(folder)
    kept = {name: text for name, text in content(folder).items() if text == b"of another program"}
    assert_goes_on(folder, 3)
    assert len(kept) == 5 and kept.items() <= content(folder).items()


def test_models_logs_and_notes_are_in_nobodys_way(tmp_path: Path):
    for name in (
        "model/config.json", "run/Qwen3-4B/config.json", "run/Qwen3-4B/model-00001-of-00002.safetensors",
        "run/model/model.safetensors", "run/slurm-123.out", "run/logs/2026-11-28/rank0.log", "run/notes_2026/plan.md",
        "run/train_01.bin",
    ):  # fmt: skip
        holding(name)(tmp_path)
    before = content(tmp_path / "run")
    assert_goes_on(tmp_path / "run", 1)
    assert before.items() <= content(tmp_path / "run").items()


def linked_twice(folder: Path) -> None:
    (folder / "step_9").symlink_to("step_1")


def hard_linked(folder: Path) -> None:
    shutil.copytree(folder / "step_1", folder / "step_9", copy_function=os.link)


def test_a_checkpoint_that_was_moved_away_and_linked_is_the_runs_own(folder: Path, tmp_path: Path):
    (archive := tmp_path / "archive").mkdir()
    shutil.move(folder / "step_2", archive)
    (folder / "step_2").symlink_to(archive / "step_2")
    before = content(archive)
    assert_goes_on(folder, 3)
    assert content(archive) == before


def copied(folder: Path) -> None:
    shutil.copytree(folder / "step_1", folder / "step_9")


def renamed(folder: Path) -> None:
    (folder / "step_2").rename(folder / "step_5")


def unrenamed(folder: Path) -> None:
    (folder / "step_5").rename(folder / "step_2")


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("make", "said", "mend"),
    [
        (copied, "step_9 is the checkpoint of step 1", lambda folder: shutil.rmtree(folder / "step_9")),
        (linked_twice, "step_9 is the checkpoint of step 1", lambda folder: (folder / "step_9").unlink()),
        (hard_linked, "step_9 is the checkpoint of step 1", lambda folder: shutil.rmtree(folder / "step_9")),
        (renamed, "step_5 is the checkpoint of step 2, copied or renamed: give it the name step_2", unrenamed),
    ],
)
def test_a_checkpoint_is_of_the_step_that_it_says(
    folder: Path, make: Callable, said: str, mend: Callable, is_old: bool
):
    if is_old:
        make_old(folder)
    make(folder)
    assert_refused(folder, said)
    mend(folder)
    assert_goes_on(folder, 3)


@pytest.mark.parametrize("name", ["step_02", "Step_2", "step-2", "best"])
def test_the_newest_checkpoint_under_another_name_is_not_trained_again(folder: Path, name: str):
    """One that was moved out of the folder is: so a user goes back."""
    (folder / "step_2").rename(folder / name)
    shutil.copytree(folder / "step_1", folder / "step_1.bak")
    assert_refused(folder, f"{name} is the checkpoint of step 2, renamed: give it the name step_2.")
    (folder / name).rename(folder / "step_2")
    assert_goes_on(folder, 3)
    shutil.move(folder / "step_4", folder.parent)
    assert_goes_on(folder, 4)


@pytest.mark.parametrize("with_ledger", [False, True])
def test_a_checkpoint_of_another_run_is_refused(folder: Path, other: Path, with_ledger: bool):
    shutil.move(other / "step_3", folder / "step_3")
    if with_ledger:  # restored by hand, or damaged, and restored from the checkpoint
        shutil.copy(other / "ledger.jsonl", folder / "ledger.jsonl")
    assert_refused(folder, "step_3 is of another run")
    shutil.rmtree(folder / "step_3")
    assert_goes_on(folder, 3)
    assert (folder / "damaged_ledger.jsonl").exists() == with_ledger


def test_a_ledger_that_is_lost_lets_no_checkpoint_of_another_run_in(folder: Path, other: Path):
    (folder / "ledger.jsonl").unlink()
    (folder / MARK).unlink()
    shutil.move(other / "step_3", folder / "step_3")
    assert_refused(folder, "its checkpoints are of several runs")
    (folder / "step_3").rename(other / "step_3")
    assert_goes_on(folder, 3)


def test_a_checkpoint_of_a_copy_of_the_run_is_refused(folder: Path, tmp_path: Path):
    shutil.copytree(folder.parent, tmp_path / "copy")
    run(tmp_path / "copy", 2)
    run(folder.parent, 1)
    shutil.rmtree(folder / "step_3")
    shutil.copytree(tmp_path / "copy/run/step_3", folder / "step_3")
    assert_refused(folder, "step_3 is not the save that the ledger names")
    shutil.rmtree(folder / "step_3")
    # A later one, whose step this run has not saved.
    run(folder.parent, 1)
    shutil.copytree(tmp_path / "copy/run/step_4", folder / "step_4")
    assert_refused(folder, "name another save of step 3: it is of a copy of this run")
    shutil.rmtree(folder / "step_4")
    assert_goes_on(folder, 4)


def make_old(folder: Path) -> None:
    """Turns a run folder into one that a version without marks has written."""
    for place in (folder, *folder.glob("step_*")):
        (place / MARK).unlink()
        lines = (place / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (place / "ledger.jsonl").write_bytes(b"".join(line for line in lines if b'"saved"' not in line))
    for step in folder.glob("step_*"):
        manifest = json.loads((step / "manifest.json").read_text())
        del manifest[MARK]
        path = step / "ledger.jsonl"
        manifest["ledger.jsonl"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        (step / "manifest.json").write_text(json.dumps(manifest, indent=1))
        (step / "COMPLETE").write_text(sha256_file(step / "manifest.json"))


def test_a_run_of_a_version_without_marks_goes_on_and_gets_one(folder: Path):
    make_old(folder)
    assert all(find_damage(folder / f"step_{step}") is None for step in (1, 2)) and not (folder / MARK).exists()
    assert_goes_on(folder, 3)
    assert (folder / MARK).exists() and {2, 3, 4} <= replay(folder / "ledger.jsonl").saved.keys()


def test_an_old_checkpoint_of_a_run_with_other_prompts_is_refused(folder: Path, other: Path):
    for path in (other / "ledger.jsonl", *other.glob("step_*/ledger.jsonl")):
        path.write_bytes(path.read_bytes().replace(b"p:1", b"q:1"))
    make_old(folder)
    make_old(other)
    shutil.move(other / "step_3", folder / "step_3")
    assert_refused(folder, "the checkpoint of step 3 name other prompts: it is of another run; move step_3 out of ")
    shutil.rmtree(folder / "step_3")
    assert_goes_on(folder, 3)


@pytest.mark.parametrize(
    "lose", [lambda path: path.unlink(), lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"{}")]
)
def test_a_mark_that_is_lost_is_that_of_the_ledger_and_the_checkpoints(folder: Path, lose: Callable[[Path], None]):
    lose(folder / MARK)
    (folder / "ledger.jsonl").unlink()
    assert_goes_on(folder, 3)


def lose_all(folder: Path) -> None:
    for path in folder.glob("step_*"):
        shutil.rmtree(path)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_run_whose_checkpoints_are_gone_is_begun_anew_only_if_it_is_asked_to(folder: Path, is_old: bool):
    if is_old:
        make_old(folder)
        (folder / METRICS).write_text('{"step": 1, "time/checkpoint": 0.1}\n{"step": 2, "time/checkpoint": 0.1}\n')
    before = (folder / METRICS).read_bytes()
    lose_all(folder)
    assert_refused(folder, "its checkpoints are gone, of step 1, 2", "checkpointing.allow_changes=[checkpoints]")
    settings = config(folder.parent)
    settings.checkpointing.allow_changes = ["checkpoints"]
    look = look_at_folder(settings, [], is_strict=False)
    assert (
        not look.problems
        and "ledger.jsonl has 2 trained steps, and no checkpoint is here: the run starts at step 0" in look.doubts[0]
    )
    for attempt in (1, 2):
        anew = RunFolder(settings)
        anew.open()
        now = Attempt(anew)
        state = now.saver.load(now.newest, last_step=9)
        assert state.step == attempt - 1
        now.saver.save_last(now.train(attempt))
        with anew:
            pass
    (kept,) = folder.glob(f"logs/*/earlier_{METRICS}")
    assert kept.read_bytes() == before and list(replay(folder / "ledger.jsonl").trained) == [1, 2]


def emptied(folder: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(folder / f"step_{step}")
        (folder / f"step_{step}").mkdir()


def lose_ledger(folder: Path) -> None:
    """Loses the checkpoints and the ledger's content, but for the times of saves among the metrics."""
    lose_all(folder)
    (folder / "ledger.jsonl").write_bytes(b"")
    (folder / METRICS).write_text('{"step": 1, "time/checkpoint": 0.1}\n{"step": 2, "time/checkpoint": 0.1}\n')


@pytest.mark.parametrize("lose", [emptied, lose_ledger])
def test_checkpoints_are_gone_however_they_went(folder: Path, tmp_path: Path, lose: Callable[[Path], None]):
    shutil.copytree(folder, tmp_path / "backup")
    lose(folder)
    assert_refused(folder, "its checkpoints are gone, of step 1, 2")
    # The way out.
    for step in (1, 2):
        shutil.rmtree(folder / f"step_{step}", ignore_errors=True)
        shutil.copytree(tmp_path / f"backup/step_{step}", folder / f"step_{step}")
    (folder / METRICS).write_bytes((tmp_path / "backup" / METRICS).read_bytes())
    assert_goes_on(folder, 3)


def test_a_run_that_was_killed_before_its_first_save_begins_anew_unasked(tmp_path: Path):
    (tmp_path / "model").mkdir()
    for _ in (1, 2, 3):
        folder = RunFolder(config(tmp_path))
        folder.open()
        now = Attempt(folder)
        assert now.saver.load(now.newest, last_step=9).step == 0
        now.train(1)
        with folder:
            pass
        assert checked(tmp_path / "run") == []
    assert [path.parent.name for path in sorted(tmp_path.glob(f"run/logs/*/earlier_{METRICS}"))] == [
        "exp_002",
        "exp_003",
    ]


def test_an_interrupted_removal_keeps_the_mark_until_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill between any two removals leaves what the next start knows as mrl's own."""
    gone, own = folder / "tmp_old_step_1", find_run(folder, {})
    (folder / "step_1").rename(gone)
    unlink, files = os.unlink, sum(path.is_file() for path in gone.rglob("*"))
    for _ in range(files):
        left = [1]

        def one(path: str, *, dir_fd: int | None = None, left: list[int] = left) -> None:
            if not left:
                raise OSError("killed")
            left.pop()
            unlink(path, dir_fd=dir_fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", one)
            remove_marked(gone)
        assert not gone.exists() or gone in left_by_kills(folder, own)
    assert not gone.exists()


def test_a_checkpoint_and_the_folder_of_runs_name_the_run_folder(folder: Path):
    step = find_strangers(folder / "step_2", "", {}, is_damaged)
    assert step == f"checkpointing.checkpoint_dir={folder / 'step_2'} is a checkpoint; name its run folder: {folder}"
    assert "it holds the folders of runs, run. mrl leaves" in find_strangers(folder.parent, "", {}, is_damaged)
