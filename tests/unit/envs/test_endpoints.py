# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mrl.config.schema.env import EnvConfig, OwnEnvConfig
from mrl.envs.endpoints import FILE_NAME, Endpoints, read_endpoints, write_endpoints
from mrl.envs.task import Task
from tests.unit.envs.pools import build_environment

FOUND = Endpoints(
    ["http://a:1/v1", "http://b:2/v1"], "key", "model", judge_urls={"fair": ["http://a:1/judges/fair/v1"]}
)


def test_the_file_is_the_owners_alone_and_replaced_at_once(tmp_path: Path):
    write_endpoints(tmp_path, Endpoints([], "", ""))
    write_endpoints(tmp_path, FOUND)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert read_endpoints(tmp_path / FILE_NAME) == FOUND


def test_a_session_stays_with_its_engine():
    chosen = {f"s{i}": FOUND.base_url(f"s{i}") for i in range(20)}
    assert set(chosen.values()) == set(FOUND.base_urls)
    assert chosen == {name: FOUND.base_url(name) for name in chosen}


def test_requests_to_a_judge_are_spread_over_the_gateways():
    urls = [f"http://{host}/judges/fair/v1" for host in "ab"]
    found = Endpoints([], "", "", judge_urls={"fair": urls})
    assert {found.judges["fair"] for _ in range(64)} == set(urls)


def test_without_a_file_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MRL_ENDPOINTS", raising=False)
    with pytest.raises(ValueError, match="expose_http_server=true"):
        read_endpoints()
    with pytest.raises(ValueError, match="while the engines of the run are up"):
        read_endpoints(tmp_path / FILE_NAME)


def test_a_reward_function_of_the_users_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "asks.py").write_text(
        "from mrl.envs.endpoints import read_endpoints\n\ndef count(prompt, response, reference_answer):\n"
        "    return float(len(read_endpoints().base_urls))\n"
    )
    write_endpoints(tmp_path, FOUND)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    config = EnvConfig(own=OwnEnvConfig(functions={"asks": "asks:count"}))
    with build_environment("asks", config, endpoints=tmp_path / FILE_NAME) as pool:
        (verdict,) = pool.score([Task(("said",), "", "", "{}")])
    assert (verdict.status, verdict.reward) == ("ok", 2.0)
