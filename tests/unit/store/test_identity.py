# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from mrl.config.model import with_value
from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import Facts, RunConfig
from mrl.data.reading import LeftOut, Rows
from mrl.store.checkpoints import CheckpointStore
from mrl.store.identity import Identity, check_identity, find_changes, identity_of, with_template_date
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from tests.unit.store.test_run_folder import config as config_of

IDS = [f"train:{line}" for line in range(1, 21)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files that make a model and its tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "transformers_version": "5.0"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("words")
    return folder


def config(model: Path) -> RunConfig:
    return config_of(model.parent)


def identity(config: RunConfig, ids: list[str] = IDS, digest: str = "rows") -> Identity:
    rows = Rows(lambda row_id, position: row_id, ids, range(len(ids)))
    # Held-out rows may change.
    return identity_of(
        config, rows, [LeftOut("data.train", digest=digest), LeftOut("data.validation", digest=str(id(rows)))]
    )


def changed(before: Identity, after: Identity) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def test_a_copy_in_another_folder_is_the_same(model: Path):
    (other := model.parent / "elsewhere" / "model").parent.mkdir()
    shutil.copytree(model, other)
    (other / "README.md").write_text("other words")
    (other / "config.json").write_text(json.dumps({"transformers_version": "6.0", "hidden_size": 64}))
    assert identity(config(model)) == identity(config(other))


def test_another_content_is_another_identity(model: Path):
    run = config(model)
    before = identity(run)
    run.grpo.num_prompts_per_step, run.grpo.max_num_steps, run.cluster.num_nodes = 7, 9, 3
    assert identity(run) == before
    for name, text, what in (
        ("config.json", '{"hidden_size": 128}', "model"),
        ("model.safetensors", "weightz", "model"),
        ("tokenizer.json", '{"a": 1}', "tokenizer"),
        ("chat_template.jinja", "x", "tokenizer"),
    ):
        kept = (model / name).read_text() if (model / name).exists() else None
        (model / name).write_text(text)
        assert changed(before, identity(run)) == [what], name
        (model / name).unlink() if kept is None else (model / name).write_text(kept)
    run.policy.tokenizer.chat_template = "{{ messages }}"
    assert changed(before, identity(run)) == ["tokenizer"]
    run = config(model)
    run.policy.tokenizer.chat_template_kwargs = {"enable_thinking": False}
    assert changed(before, identity(run)) == ["tokenizer"]
    run = config(model)
    for ids, digest in ((IDS[:-1], "rows"), (IDS, "other rows")):
        assert changed(before, identity(run, ids, digest)) == ["data"]
    run.grpo.seed += 1
    assert changed(before, identity(run)) == ["data"]
    run = config(model)
    run.data.shuffle = False
    in_order = identity(run)
    assert changed(before, in_order) == ["data"]
    run.grpo.seed += 1
    assert identity(run) == in_order


def test_a_changed_seed_is_named_and_one_that_no_older_run_has_written_is_not(model: Path, tmp_path: Path):
    run = config(model)
    before, after = identity(run), identity(with_value(run, "grpo.seed", run.grpo.seed + 1))
    assert changed(before, after) == ["data"]
    file = tmp_path / "identity.json"
    assert "order (files, split, seed, shuffle)" in before["data"]  # or runs that began before could not resume
    older = {**before, "data": {part: value for part, value in before["data"].items() if part != "seed"}}
    for written, said in ((before, "(seed, order (files, split, seed, shuffle, weight) differ)"), (older, "(order (")):
        file.write_text(json.dumps(written))
        (refused,), _ = find_changes(file, after, allowed=[], resumes_at=4)
        assert said in refused and find_changes(file, before, allowed=[], resumes_at=4) == ([], [])


def test_the_batch_of_examples_decides_their_order(model: Path):
    run = config(model)
    run.algorithm = "sft"
    before = identity(run)
    run.policy.train_global_batch_size = 64
    assert changed(before, identity(run)) == ["data"]


def keep_identity(file: Path, now: Identity, *, allowed: Sequence[str], resumes_at: int) -> None:
    """Checks an identity and writes it, as a start that trains does."""
    check_identity(file, now, allowed=allowed, resumes_at=resumes_at)
    file.write_text(json.dumps(now))


def test_a_run_resumes_with_what_it_had_unless_a_key_says_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "identity.json"
    one = {"model": {"config.json": "a", "x": "b"}, "tokenizer": {"t": "c"}, "data": {"rows": "d"}}
    two = {"model": {"config.json": "a", "y": "b"}, "tokenizer": {"t": "c"}, "data": {"rows": "e"}}
    keep_identity(file, one, allowed=[], resumes_at=0)
    keep_identity(file, two, allowed=[], resumes_at=0)  # nothing has been trained
    keep_identity(file, one, allowed=["model", "data"], resumes_at=20)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    check_identity(file, one, allowed=[], resumes_at=20)
    with pytest.raises(ValueError) as refused:
        check_identity(file, two, allowed=["tokenizer", "data"], resumes_at=20)
    assert str(refused.value) == (
        "policy.model_name: the run resumes at step 20 with another model than before (y, x differ); set it back, "
        "choose another checkpointing.checkpoint_dir, or set checkpointing.allow_changes=[model]"
    )
    assert json.loads(file.read_text()) == one
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"identity\.json is damaged; restore it"):
        check_identity(file, one, allowed=[], resumes_at=20)
    check_identity(tmp_path / "older_run.json", two, allowed=[], resumes_at=20)  # whose attempts wrote no identity


def test_a_run_keeps_the_date_of_its_first_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def on(day: str, run: RunConfig) -> RunConfig:
        monkeypatch.setattr(
            "mrl.store.identity.date", type("day", (), {"today": staticmethod(lambda: date.fromisoformat(day))})
        )
        return with_template_date(run)

    caplog.set_level("INFO")
    run = config(model)
    assert on("2026-01-31", run).policy.tokenizer.template_date is None and not caplog.records
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    first = on("2026-01-31", run)
    assert (run.policy.tokenizer.template_date, first.policy.tokenizer.template_date) == (None, "2026-01-31")
    assert "all prompts of this run have 2026-01-31, also after it resumes" in caplog.text
    Path(run.checkpointing.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    file = Path(run.checkpointing.checkpoint_dir) / "identity.json"
    keep_identity(file, identity(first), allowed=[], resumes_at=0)
    later = on("2026-02-02", run)
    assert later.policy.tokenizer.template_date == "2026-01-31"
    keep_identity(file, identity(later), allowed=[], resumes_at=20)
    check_identity(file, identity(on("2026-02-03", run)), allowed=[], resumes_at=40)
    run.policy.tokenizer.template_date = "2026-02-02"
    with pytest.raises(ValueError, match=r"another tokenizer than before \(policy.tokenizer.template_date differ\)"):
        check_identity(file, identity(on("2026-02-02", run)), allowed=[], resumes_at=40)


def open_attempt(run: RunConfig) -> None:
    folder = RunFolder(run, identity(run))
    folder.open()
    with folder:
        folder.note_attempt()


def test_each_attempt_keeps_its_config_and_says_what_changed(model: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    run = config(model)
    open_attempt(run)
    run.grpo.max_num_steps, run.loss_fn.ratio_clip_min = 7, 0.25
    open_attempt(replace(run, facts=Facts(origins={"grpo.max_num_steps": "command line"})))
    changes = [record.getMessage() for record in caplog.records if "last attempt" in record.getMessage()]
    old = RunConfig()
    assert changes == [
        f"Config since the last attempt: grpo.max_num_steps={old.grpo.max_num_steps} -> 7 (command line)",
        f"Config since the last attempt: loss_fn.ratio_clip_min={old.loss_fn.ratio_clip_min} -> 0.25",
    ]
    folder = model.parent / "run"
    texts = [
        path.read_text()
        for path in (folder / "logs/exp_001/config.yaml", folder / "logs/exp_002/config.yaml", folder / "config.yaml")
    ]
    assert texts[0] != texts[1] == texts[2]


def test_a_config_that_cannot_be_read_is_not_compared(model: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    run = config(model)
    open_attempt(run)
    (model.parent / "run/config.yaml").write_text("a: [")
    open_attempt(run)
    assert any("config.yaml cannot be read, so nothing is compared" in record.getMessage() for record in caplog.records)


def test_a_refused_attempt_leaves_the_folder_as_it_is(model: Path):
    run, folder = config(model), model.parent / "run"
    open_attempt(run)
    checkpoints = CheckpointStore(folder, run.checkpointing)
    checkpoints.commit(checkpoints.begin(RunState(step=20)), {})
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run.grpo.seed += 1
    with pytest.raises(
        ValueError, match=r"data\.train: the run resumes at step 20 .*checkpointing\.allow_changes=\[data\]"
    ):
        open_attempt(run)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run.checkpointing.allow_changes = ["data"]
    open_attempt(run)


def test_a_teacher_is_one_by_its_content(model: Path, tmp_path: Path):
    alone = config(model)
    before = identity(alone)
    alone.algorithm = "distillation"
    teacher = shutil.copytree(model, tmp_path / "teacher")
    alone.teacher = PolicyConfig(model_name=str(teacher), tokenizer=TokenizerConfig(name=str(teacher)))
    distilled = identity(alone)
    assert {name: parts for name, parts in distilled.items() if name != "teacher"} == before
    file = tmp_path / "identity.json"
    keep_identity(file, distilled, allowed=[], resumes_at=0)
    check_identity(file, distilled, allowed=[], resumes_at=3)
    (teacher / "model.safetensors").write_bytes(b"others")
    other = identity(alone)
    with pytest.raises(
        ValueError, match=r"teacher.model_name or .* another teacher than before \(model.safetensors differ\)"
    ):
        check_identity(file, other, allowed=["model"], resumes_at=3)
    keep_identity(file, other, allowed=["teacher"], resumes_at=3)
    with pytest.raises(ValueError, match="another teacher"):
        check_identity(file, before, allowed=[], resumes_at=3)
