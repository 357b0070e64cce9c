# SPDX-License-Identifier: Apache-2.0
"""Values that the config hands on to libraries and processes are there while they run."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

from mrl import env
from mrl.cluster.environment import find_writable_by_others
from mrl.cluster.runtime import FOLDER_PREFIX, OWNER_FILE, RAY_FOLDER
from tests.stack.loop.conftest import LiveRun
from tests.stack.processes import listening_sockets


def test_arguments_of_vllm_are_those_of_the_live_engines(live: LiveRun):
    def settings(engine) -> tuple[str, str, str | None]:
        config = engine.llm.vllm_config
        return config.cache_config.mamba_ssm_cache_dtype, config.scheduler_config.policy, os.environ.get("PASSED_ON")

    assert live.on_engines(settings) == [("float32", "priority", "to an engine")] * 2


def test_arguments_of_megatron_are_those_of_the_live_ranks(live: LiveRun):
    def settings(policy) -> tuple[bool, str, bool, str | None]:
        from megatron.core import parallel_state

        config = policy._chunks[0].config

        has_gloo = parallel_state._DATA_PARALLEL_GROUP_GLOO is not None
        return (
            config.clone_scatter_output_in_embedding,
            config.attention_backend.name,
            has_gloo,
            os.environ.get("PASSED_ON"),
        )

    assert live.on_ranks(settings) == [(False, "flash", True, "to a rank")] * 4


def test_secrets_reach_processes_and_nothing_that_is_written(live: LiveRun):
    def token(_) -> str | None:
        return os.environ.get("PASSED_ON_TOKEN")

    assert set(live.on_ranks(token) + live.on_engines(token)) == {"planted-secret"}
    owners = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{OWNER_FILE}")
    (of_ray,) = (path.parent / RAY_FOLDER for path in owners if json.loads(path.read_text())["pid"] == os.getpid())
    folders = {"Ray": of_ray / "session_latest" / "logs", "the run": live.run.folder.path}
    files = {name: [path for path in folder.rglob("*") if path.is_file()] for name, folder in folders.items()}
    assert any(b"OMP_NUM_THREADS" in path.read_bytes() for path in files["Ray"]), "Ray does not log variables any more"
    assert [path for found in files.values() for path in found if b"planted-secret" in path.read_bytes()] == []


def test_ranks_of_one_node_meet_in_a_file_that_nobody_else_may_open(live: LiveRun):
    path, _ = live.run.supplier.session.policies.master
    assert Path(path).is_file() and stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700


def test_a_run_of_one_node_listens_on_loopback_alone(live: LiveRun):
    listening = listening_sockets()
    assert {"ray::PolicyActor", "ray::EngineActor"} <= {
        name.partition(".")[0].partition(":call")[0] for name, _ in listening
    }, listening
    assert {address for _, address in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening


def test_what_processes_write_beside_the_run_is_private(live: LiveRun):
    def places(_) -> tuple[str, ...]:
        import torch._inductor.runtime.runtime_utils as inductor
        import triton

        return tempfile.gettempdir(), inductor.cache_dir(), triton.knobs.cache.dir, os.environ["VLLM_CACHE_ROOT"]

    session = str(Path(live.run.supplier.session.policies.master[0]).parent)
    found = set(live.on_ranks(places) + live.on_engines(places))
    assert {temporary for temporary, *_ in found} == {session}
    assert {
        find_writable_by_others(Path(place)) for _, *caches in found for place in caches if Path(place).exists()
    } <= {None}
    kept = {str(folder.expanduser().resolve()) for folder in env.compiled_folders()}
    assert {str(Path(place).parent) for _, *caches in found for place in caches} <= {*kept, session}
