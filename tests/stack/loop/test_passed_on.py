# SPDX-License-Identifier: Apache-2.0
"""What the config hands on to libraries and processes is there while they run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from mrl.cluster.runtime import FOLDER_PREFIX, OWNER_FILE, RAY_FOLDER
from tests.stack.loop.conftest import PORTS, LiveRun


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
        return config.clone_scatter_output_in_embedding, config.attention_backend.name, has_gloo, os.environ.get("PASSED_ON")

    assert live.on_ranks(settings) == [(False, "flash", True, "to a rank")] * 4


def test_secrets_reach_processes_and_nothing_that_is_written(live: LiveRun):
    def token(_) -> str | None:
        return os.environ.get("PASSED_ON_TOKEN")

    assert set(live.on_ranks(token) + live.on_engines(token)) == {"planted-secret"}
    owners = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{OWNER_FILE}")
    (of_ray,) = (path.parent / RAY_FOLDER for path in owners if json.loads(path.read_text())["pid"] == os.getpid())
    folders = {"Ray": of_ray / "session_latest" / "logs", "the run": live.run.folder.path}
    files = {name: [path for path in folder.rglob("*") if path.is_file()] for name, folder in folders.items()}
    assert any(b"to a rank" in path.read_bytes() for path in files["Ray"]), "Ray does not log variables any more"
    assert [path for found in files.values() for path in found if b"planted-secret" in path.read_bytes()] == []


def test_ranks_meet_at_a_port_of_the_range(live: LiveRun):
    assert live.run.supplier.session.policies.master[1] in PORTS
