# SPDX-License-Identifier: Apache-2.0
"""Attacks of a host's other users and containers on a run's files and ports."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from conversion.files.owners import ABANDONED_S, Owner, this_process
from mrl.cluster.environment import CACHES, keep_caches_private
from mrl.cluster.policies import MEETING_FILE
from mrl.cluster.runtime import FOLDER_PREFIX, OWNER_FILE, RAY_FOLDER, ray_runtime, reclaim_dead_owners
from mrl.config.load import load_config
from mrl.refit.group import GroupAddress
from tests.waiting import HANG_S

pytestmark = pytest.mark.attack("a neighbour on the host")

NOBODY = 2**22 + 1
"""Above the largest process id of Linux."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(temporary: Path, owner: Owner, *, age_s: float = 0.0) -> Path:
    """A run's folder that its owner touched so long ago."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=temporary))
    (folder / OWNER_FILE).write_text(json.dumps(asdict(owner)))
    then = time.time() - age_s
    os.utime(folder / OWNER_FILE, (then, then))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": 1, "pid": NOBODY},
        {"boot": "0" * 32, "pid": NOBODY},
        {"host": "another", "boot": "0" * 32, "namespace": 1, "pid": 1, "start": 0},
        {},
    ],
    ids=["another container", "another host", "all differs", "this process"],
)
def test_a_living_owner_elsewhere_keeps_its_folder(temporary: Path, changes: dict):
    folder = left_behind(temporary, replace(this_process(), **changes))
    reclaim_dead_owners()
    assert (folder / OWNER_FILE).exists()


@pytest.mark.parametrize(
    ("changes", "age_s"),
    [
        ({"pid": NOBODY}, 0.0),
        ({"start": 1}, 0.0),
        ({"namespace": 1}, 2 * ABANDONED_S),
        ({"boot": "0" * 32}, 2 * ABANDONED_S),
    ],
    ids=["ended", "its id is another's", "silent container", "before the last boot"],
)
def test_a_dead_owner_s_folder_goes(temporary: Path, changes: dict, age_s: float):
    folder = left_behind(temporary, replace(this_process(), **changes), age_s=age_s)
    reclaim_dead_owners()
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "12345", "{}", "[]", '{"pid": 1}', "null", "\0"], ids=repr)
def test_a_file_that_names_no_owner_removes_nothing(temporary: Path, text: str):
    folder = left_behind(temporary, this_process())
    (folder / OWNER_FILE).write_text(text)
    reclaim_dead_owners()
    assert (folder / OWNER_FILE).exists()


def test_a_link_to_somebody_s_folder_is_not_followed(temporary: Path, tmp_path_factory: pytest.TempPathFactory):
    precious = tmp_path_factory.mktemp("precious")
    (precious / OWNER_FILE).write_text(json.dumps(asdict(replace(this_process(), pid=NOBODY))))
    (temporary / f"{FOLDER_PREFIX}link").symlink_to(precious)
    reclaim_dead_owners()
    assert (precious / OWNER_FILE).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_another_user_s_folder_is_left_alone(temporary: Path):
    folder = left_behind(temporary, replace(this_process(), pid=NOBODY))
    os.chown(folder, 12345, 12345)
    reclaim_dead_owners()
    assert folder.exists()


OTHER_USER = 54321


def as_other_user(call: Callable[[], object]) -> str:
    """Result or error of `call` in a child of another user."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            said = repr(call())
        except (OSError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_speak_to_the_store_of_the_ranks():
    """The folder is made as a run makes it; the store is that of ranks, refits and the driver."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        address = GroupAddress(f"{folder}/{MEETING_FILE}", 0, "exchange 1", (0,))
        address.store(timeout_s=HANG_S).set("rank 0", "is here")
        assert address.store(timeout_s=HANG_S).get("rank 0") == b"is here"
        said = as_other_user(lambda: address.store(timeout_s=HANG_S).set("neighbour", "was here"))
        assert "ermission denied" in said, said
        address.give_up(3)
        assert not address.store(timeout_s=HANG_S).check(["neighbour"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and nothing set for caches."""
    for name in CACHES:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name in ("HF_HOME", "MRL_COMPILED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_compiled_code_is_kept_where_nobody_else_writes(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Not in the folder of the temporary folder that torch would take, and that a neighbour may have made first."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_me")  # as torch notes it, when it is imported
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/chosen")
    assert keep_caches_private() == ""
    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / ".cache/mrl-compiled/torch")
    assert stat.S_IMODE((home / ".cache/mrl-compiled").stat().st_mode) == 0o700
    assert os.environ["VLLM_CACHE_ROOT"] == "/chosen"


def test_compiled_code_outlives_a_container_beside_the_cache_of_the_hub(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "shared"
    monkeypatch.setenv("HF_HOME", str(shared / "huggingface"))
    assert keep_caches_private() == ""
    root = Path(os.environ["TRITON_CACHE_DIR"]).parent
    assert root == shared / f"mrl-compiled-{os.getuid()}" and stat.S_IMODE(root.stat().st_mode) == 0o700
    # Shared with a group that may write: its programs would be run here.
    root.rmdir()
    shared.chmod(0o775)
    for name in CACHES:
        monkeypatch.delenv(name)
    assert f"others may write to {shared}" in keep_caches_private()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == home / ".cache/mrl-compiled"
    for name in CACHES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MRL_COMPILED", str(tmp_path / "mine"))
    assert keep_caches_private() == "" and Path(os.environ["VLLM_CACHE_ROOT"]) == tmp_path / "mine/vllm"


@pytest.mark.parametrize("place", [".", ".cache", ".cache/mrl-compiled"])
def test_a_folder_that_others_may_change_keeps_no_compiled_code(home: Path, temporary: Path, place: str):
    (home / ".cache/mrl-compiled").mkdir(parents=True, mode=0o700)
    (home / place).chmod(0o777)
    warning = keep_caches_private()
    assert f"others may write to {(home / place).resolve()}" in warning
    taken = Path(os.environ["TRITON_CACHE_DIR"]).parent
    assert taken.parent == temporary and stat.S_IMODE(taken.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_folder_that_another_user_has_made_first_keeps_no_compiled_code(home: Path, temporary: Path):
    (home / ".cache/mrl-compiled").mkdir(parents=True, mode=0o700)
    os.chown(home / ".cache/mrl-compiled", OTHER_USER, OTHER_USER)
    assert "another user's" in keep_caches_private()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent.parent == temporary


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """The folder of a run of one node, whose Ray is up, although its user's shell switches tokens off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_runtime(load_config("grpo_tiny.yaml")):
            (folder,) = (
                path.parent
                for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{OWNER_FILE}")
                if json.loads(path.read_text()) == asdict(this_process())
            )
            yield folder


@pytest.mark.long("hostile")
def test_nobody_else_enters_the_folder_of_ray(run: Path):
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (run / RAY_FOLDER / "session_latest").is_dir()


@pytest.mark.long("hostile")
def test_ray_of_one_node_listens_on_loopback_alone(run: Path):
    from tests.stack.processes import listening_sockets

    listening = listening_sockets()
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {address for _, address in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening


@pytest.mark.long("hostile")
def test_ray_asks_for_a_token_whatever_the_shell_says(run: Path):
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert stat.S_IMODE(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).stat().st_mode) == 0o600
