# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.rules.data import environment_names
from mrl.config.schema.env import BUILT_IN, SERVERS, EnvConfig, MathEnvConfig, OwnEnvConfig
from mrl.envs.scorer import ENVIRONMENTS
from mrl.envs.task import Task
from tests.sources import ROOT
from tests.unit.envs.pools import build_environment
from tests.waiting import HANG_S


def test_every_built_in_environment_starts():
    config = EnvConfig(math=MathEnvConfig(num_workers=1, timeout_s=HANG_S))
    assert set(SERVERS.values()) == set(BUILT_IN) == set(ENVIRONMENTS)
    for name in BUILT_IN:
        with build_environment(name, config) as pool:
            if name == "math":
                assert pool.environment.timeout_s == HANG_S
                assert pool.score([Task(("046",), "46")])[0].reward == 1.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_names_the_fields_that_an_environment_reads(name: str):
    page = (ROOT / "docs" / "environments.md").read_text()
    (line,) = [line for line in page.split("\n") if line.startswith(f"| `{name}` |")]
    assert [field for field in ENVIRONMENTS[name](EnvConfig()).row_fields if f"`{field}`" not in line] == []


def test_a_reward_function_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards.py").write_text(
        "def brief(prompt, response, reference_answer):\n    return 1.0 / len(response)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvConfig(own=OwnEnvConfig(functions={"brief": "my_rewards:brief"}))
    assert "brief" in environment_names(config)
    with build_environment("brief", config) as pool:
        assert pool.score([Task(("four",), "")])[0].reward == 0.25


def test_a_reward_function_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "their_rewards.py").write_text("def loud(response):\n    return float(response.isupper())\n")
    info = tmp_path / "their_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mrl.rewards]\nloud = their_rewards:loud\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment_names(EnvConfig())[-1] == "loud"
    with build_environment("loud", EnvConfig()) as pool:
        assert [verdict.reward for verdict in pool.score([Task(("A",)), Task(("a",))])] == [1.0, 0.0]


def test_a_function_that_is_not_there_ends_the_start():
    config = EnvConfig(own=OwnEnvConfig(functions={"gone": "no_such_module:fn"}))
    with pytest.raises(RuntimeError, match="no_such_module:fn does not start"):
        build_environment("gone", config)
