# SPDX-License-Identifier: Apache-2.0
import dataclasses
import errno
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.files.manifest import file_record
from mrl.config.schema.run import CheckpointingConfig
from mrl.store.checkpoints import MANIFEST, MARKER, CheckpointStore, checkpoints_text, find_damage
from mrl.types import RunState
from tests.unit.store.conftest import Synced


def store(folder: Path, **settings: object) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointingConfig(**{"save_period": 1, **settings}))


def save(checkpoints: CheckpointStore, step: int, accuracy: float | None = None, **other: float) -> Path:
    metrics = {} if accuracy is None else {"val/accuracy": accuracy, **{f"val/{name}": other[name] for name in other}}
    pending = checkpoints.begin(RunState(step=step, metrics=metrics))
    (pending.weights / "iter_0000000").mkdir()
    (pending.weights / "iter_0000000" / "data").write_bytes(bytes([step]) * 100)
    return checkpoints.commit(pending, {}).folder


def test_the_newest_complete_checkpoint_is_found_with_its_state(tmp_path: Path):
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2, accuracy=0.5)
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 2
    assert dataclasses.asdict(newest.state()) == {"step": 2, "weight_version": 0, "metrics": {"val/accuracy": 0.5}}
    assert not list(tmp_path.glob("tmp_*"))


def test_a_checkpoint_is_on_disk_before_it_gets_its_name(tmp_path: Path, synced: Synced):
    folder = save(store(tmp_path), 3)
    files = {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    folders = {path.relative_to(folder) for path in folder.rglob("*") if path.is_dir()}
    aside = tmp_path / "tmp_step_3"
    before = [(path, size) for path, size in synced.calls if path.is_relative_to(aside)]
    # The manifest and the marker are written under another name first; the marker comes last.
    sizes = {path.relative_to(aside): size for path, size in before if not path.name.startswith(".")}
    sealed = [
        size for path, size in before if path.name.startswith(f".{MANIFEST}") or path.name.startswith(f".{MARKER}")
    ]
    assert sealed == [files.pop(Path(MANIFEST)), files.pop(Path(MARKER))]
    assert {path: sizes.get(path) for path in files} == files
    assert folders <= sizes.keys()
    assert before[-2][0].name.startswith(f".{MARKER}") and before[-1][0] == aside
    assert synced.calls[-1][0] == tmp_path


def damage_flip(folder: Path) -> None:
    data = folder / "policy" / "weights" / "iter_0000000" / "data"
    content = bytearray(data.read_bytes())
    content[50] ^= 1
    data.write_bytes(content)


def damage_truncate(folder: Path) -> None:
    data = folder / "policy" / "weights" / "iter_0000000" / "data"
    data.write_bytes(data.read_bytes()[:-1])


def damage_remove(folder: Path) -> None:
    (folder / "policy" / "weights" / "iter_0000000" / "data").unlink()


def damage_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def damage_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_flip, "sha256"),
        (damage_truncate, "99 bytes, the manifest says 100"),
        (damage_remove, "missing"),
        (damage_marker, "never completed"),
        (damage_manifest, "differs from the completion marker"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, message: str
):
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    folder = save(checkpoints, 2)
    damage(folder)
    assert message in (find_damage(folder) or "")
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    assert "passing over" in caplog.text and "step_2" in caplog.text


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_a_bad_block(file: Path) -> None:
    """Reading it gives EIO."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def replace_by_a_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("break_", "name"),
    [
        *itertools.product(
            [replace_by_a_folder, replace_by_a_bad_block, replace_by_a_loop, empty, Path.unlink], [MARKER, MANIFEST]
        ),
        *itertools.product(
            [replace_by_a_folder, replace_by_a_bad_block], ["training_info.json", "policy/weights/iter_0000000/data"]
        ),
    ],
)
def test_damage_of_any_kind_is_found_once_and_remembered(tmp_path: Path, break_: Callable[[Path], None], name: str):
    checkpoints = store(tmp_path, metric_name=None)
    for step in (1, 2):
        save(checkpoints, step)
    break_(tmp_path / "step_2" / name)
    first = store(tmp_path).newest(sets_aside=True)
    assert first is not None and first.step == 1
    # Two attempts later the damaged one has been in nobody's way, and is still there.
    for step in (2, 3):
        save(store(tmp_path, metric_name=None, keep_top_k=1), step)
        newest = store(tmp_path).newest(with_shards=True)
        assert newest is not None and newest.step == step
        assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_2", f"step_{step}"]


@pytest.mark.parametrize(
    ("settings", "break_"),
    [
        ({"keep_top_k": 1}, damage_marker),
        ({"keep_top_k": 3}, damage_truncate),
        ({"keep_top_k": 3, "ft_keep_latest_k": 2}, damage_manifest),
        ({"keep_top_k": None}, lambda folder: (folder / MARKER).write_bytes(b"")),
    ],
)
def test_pruning_counts_whole_checkpoints_only(tmp_path: Path, settings: dict, break_: Callable[[Path], None]):
    settings = {"save_period": 20, "metric_name": None, **settings}
    for step in (20, 40, 60):
        save(store(tmp_path, **(settings | {"keep_top_k": None})), step)
    for step in (20, 60):
        break_(tmp_path / f"step_{step}")
    # A signal's checkpoint, between two periods; an attempt that has not looked at the newer one would have resumed
    # from it.
    for step in (53, 55):
        save(store(tmp_path, **settings), step)
        newest = store(tmp_path).newest(before=60)
        assert newest is not None and newest.step == step
    kept = {"step_40", "step_55"} | ({"step_53"} if settings.get("ft_keep_latest_k") == 2 else set())
    assert {path.name for path in tmp_path.iterdir()} == kept | {"step_60", "damaged_step_20"}


def test_a_removal_that_fails_does_not_make_a_save_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    settings = {"keep_top_k": 1, "metric_name": None}
    save(store(tmp_path, **settings), 1)

    def fail(path: Path, prefix: str) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("mrl.store.checkpoints.put_marked_aside", fail)
        save(store(tmp_path, **settings), 2)
    assert "step_2 is saved" in caplog.text and "Input/output error" in caplog.text
    save(store(tmp_path, **settings), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize("no_number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_metric_that_is_no_number_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, higher_is_better: bool, no_number: float
):
    values = (0.5, 0.9, no_number, 0.2, 0.3) if higher_is_better else (0.5, 0.1, no_number, 0.2, 0.3)
    for step, value in enumerate(values, start=1):
        save(store(tmp_path, keep_top_k=1, higher_is_better=higher_is_better), step, value)
        assert (tmp_path / f"step_{step}").exists() and (tmp_path / f"step_{min(step, 2)}").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_5"]
    assert [record.getMessage() for record in caplog.records] == [
        f"step 3 has val/accuracy = {no_number}: its checkpoint ranks last by val/accuracy (checkpointing.metric_name)"
    ]


def test_a_step_without_validation_is_told_from_one_without_the_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    for metrics in ({"train/loss": 1.0}, {"val/reward": 1.0}):
        store(tmp_path).begin(RunState(step=3, metrics=metrics))
    ranks = "its checkpoint ranks last by val/accuracy (checkpointing.metric_name)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"step 3 was not validated: {ranks}"),
        ("WARNING", f"step 3 has no metric val/accuracy: {ranks}"),
    ]


def test_an_interrupted_save_leaves_nothing_that_looks_complete(tmp_path: Path):
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    pending = checkpoints.begin(RunState(step=2))
    (pending.weights / "data").write_bytes(b"half")
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    checkpoints.remove_unfinished()
    assert not pending.folder.exists()


ACCURACIES = {1: 0.9, 2: 0.5, 3: 0.7, 4: None, 5: 0.1}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_top_k": 2}, [1, 3, 5]),
        ({"keep_top_k": 2, "higher_is_better": False}, [2, 5]),
        ({"keep_top_k": 2, "metric_name": "val:total_reward/mean"}, [1, 3, 5]),  # NeMo RL's name for the same
        ({"keep_top_k": None}, [1, 2, 3, 4, 5]),
        ({"keep_top_k": 2, "metric_name": None}, [4, 5]),
        ({"keep_top_k": 1, "ft_keep_latest_k": 3}, [1, 3, 4, 5]),
        # Only checkpoints of the period are kept for their metric; the others are for recovery.
        ({"keep_top_k": 3, "save_period": 2}, [2, 4, 5]),
        ({"keep_top_k": None, "save_period": 3, "ft_keep_latest_k": 2}, [3, 4, 5]),
    ],
)
def test_what_is_kept(tmp_path: Path, settings: dict[str, object], kept: list[int]):
    checkpoints = store(tmp_path, **settings)
    for step, accuracy in ACCURACIES.items():
        save(checkpoints, step, accuracy)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step}" for step in kept]


def test_few_judged_rollouts_do_not_make_the_best_checkpoint(tmp_path: Path):
    checkpoints = store(tmp_path, keep_top_k=1)
    for step, accuracy, num_judged in ((1, 0.6, 512), (2, 1.0, 2), (3, 0.5, 512)):
        save(checkpoints, step, accuracy, num_judged=num_judged, num_samples=512)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_1", "step_3"]


def test_a_checkpoint_that_cannot_be_ranked_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = store(tmp_path, metric_name="train:loss")
    checkpoints.begin(RunState(step=1, metrics={"train/loss": 1.0}))
    assert not caplog.records
    checkpoints.begin(RunState(step=2, metrics={"val/loss": 1.0}))
    assert "step 2 has no metric train/loss: its checkpoint ranks last" in caplog.text


def test_the_newest_and_the_best_checkpoints_are_named(tmp_path: Path):
    checkpoints = store(tmp_path, keep_top_k=None)
    assert checkpoints.best_text() == ""
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.5)):
        save(checkpoints, step, accuracy)
    assert checkpoints.best_text() == "step_3 (val/accuracy 0.5), step_2 (val/accuracy 0.9, best)"
    lowest = store(tmp_path, higher_is_better=False)
    assert lowest.best_text() == "step_3 (val/accuracy 0.5), step_1 (val/accuracy 0.2, best)"
    save(checkpoints, 4)
    assert checkpoints.best_text() == "step_4 (unranked), step_2 (val/accuracy 0.9, best)"
    (tmp_path / "config.yaml").write_text("checkpointing: {metric_name: 'val:accuracy', higher_is_better: false}")
    assert checkpoints_text(tmp_path) == (
        f"give one of its checkpoints: {tmp_path}/step_4, {tmp_path}/step_3 (val/accuracy 0.5), "
        f"{tmp_path}/step_2 (val/accuracy 0.9), {tmp_path}/step_1 (val/accuracy 0.2, best)"
    )


def test_a_metric_that_validations_lack_is_told_at_the_first_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = store(tmp_path, metric_name="val:score/reward_rigth")
    for step in (0, 3):
        checkpoints.check_measured(step, {"val/accuracy": 0.5, "val/score/reward_right": 0.5})
    store(tmp_path).check_measured(0, {"val/accuracy": 0.5})
    store(tmp_path, metric_name="val:loss", enabled=False).check_measured(0, {"val/accuracy": 0.5})
    assert [record.getMessage() for record in caplog.records] == [
        "checkpointing.metric_name=val:score/reward_rigth: the validation of step 0 has no such metric, and "
        "checkpoints without it rank last; it has val:score/reward_right, val:accuracy"
    ]


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    checkpoints = store(tmp_path)
    save(checkpoints, 1, accuracy=0.1)
    save(checkpoints, 1, accuracy=0.2)
    newest = checkpoints.newest()
    assert newest is not None and newest.state().metrics == {"val/accuracy": 0.2}


def test_the_state_is_that_of_the_begin_whatever_the_loop_does_until_the_weights_are_written(tmp_path: Path):
    state = RunState(step=2, metrics={"val/accuracy": 0.5})
    pending = store(tmp_path).begin(state)
    state.step = 3
    state.metrics["val/accuracy"] = 0.1
    saved = store(tmp_path).commit(pending, {})
    assert saved.folder == tmp_path / "step_2"
    assert saved.state() == RunState(step=2, metrics={"val/accuracy": 0.5})


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"weights", None), (b"weight", "6 bytes, the manifest says 7"), (b"Weights", "the manifest's sha256")],
)
def test_what_the_writer_says_of_its_files_is_what_is_checked(tmp_path: Path, content: bytes, message: str | None):
    checkpoints = store(tmp_path)
    pending = checkpoints.begin(RunState(step=1))
    (pending.weights / "data").write_bytes(b"weights")
    on_disk = {"policy/weights/data": file_record(pending.weights / "data")}
    (pending.weights / "data").write_bytes(content)
    found = find_damage(checkpoints.commit(pending, on_disk).folder)
    assert (found or "").endswith(message or "") and (found is None) == (message is None)
