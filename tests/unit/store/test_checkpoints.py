import dataclasses
from pathlib import Path

import pytest

from conversion.manifest import file_record
from mrl.store.checkpoints import MANIFEST, MARKER, CheckpointStore, find_damage
from mrl.types import RunState


def store(folder: Path, keep_top_k: int = 3) -> CheckpointStore:
    return CheckpointStore(folder, keep_top_k=keep_top_k, metric_name="val:accuracy", higher_is_better=True)


def save(checkpoints: CheckpointStore, step: int, accuracy: float | None = None) -> Path:
    metrics = {} if accuracy is None else {"val/accuracy": accuracy}
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
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, message: str):
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    folder = save(checkpoints, 2)
    damage(folder)
    assert message in (find_damage(folder) or "")
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    assert "passing over" in caplog.text and "step_2" in caplog.text


def test_an_interrupted_save_leaves_nothing_that_looks_complete(tmp_path: Path):
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    pending = checkpoints.begin(RunState(step=2))
    (pending.weights / "data").write_bytes(b"half")
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    checkpoints.remove_unfinished()
    assert not pending.folder.exists()


def test_the_best_and_always_the_newest_are_kept(tmp_path: Path):
    checkpoints = store(tmp_path, keep_top_k=2)
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.7), (4, 0.1)):
        save(checkpoints, step, accuracy)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_1", "step_4"]


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
    ("content", "message"), [(b"weights", None), (b"weight", "6 bytes, the manifest says 7"), (b"Weights", "the manifest's sha256")]
)
def test_what_the_writer_says_of_its_files_is_what_is_checked(tmp_path: Path, content: bytes, message: str | None):
    checkpoints = store(tmp_path)
    pending = checkpoints.begin(RunState(step=1))
    (pending.weights / "data").write_bytes(b"weights")
    on_disk = {"data": file_record(pending.weights / "data")}
    (pending.weights / "data").write_bytes(content)
    found = find_damage(checkpoints.commit(pending, on_disk).folder)
    assert (found or "").endswith(message or "") and (found is None) == (message is None)
