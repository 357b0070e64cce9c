# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

from mrl.check import examine
from mrl.config.schema.run import RunConfig
from mrl.description import ROWS
from mrl.envs.workers import describe_workers, environments_of, num_workers, usable_cores


def read(*overrides: str, name: str = "grpo_tiny.yaml") -> RunConfig:
    config = examine(name, overrides).config
    assert config is not None
    return config


def test_environments_share_the_cores_of_a_node():
    one = read()
    assert environments_of(one) == ("math",)
    assert [num_workers("math", one, num_cores=cores) for cores in (1, 2, 64)] == [2, 2, 64]
    # Rows may name an environment that the config does not.
    assert num_workers("mcqa", one, num_cores=64) == 64
    two = read("++env.own.functions.mine=my_rewards:mine")
    assert environments_of(two) == ("mine", "math") and num_workers("math", two, num_cores=64) == 32


def test_a_number_is_of_all_nodes_together_and_bounded_by_cores_where_children_compute():
    config = read("env.math.num_workers=40", "env.own.num_workers=40", "cluster.num_nodes=4")
    assert [num_workers("math", config, num_cores=cores) for cores in (4, 64)] == [4, 10]
    assert num_workers("mine", config, num_cores=4) == 10
    assert num_workers("math", read("env.math.num_workers=1", "cluster.num_nodes=4"), num_cores=64) == 2
    # One model of its own, perhaps.
    assert num_workers("mine", read(), num_cores=64) == 1


def test_nodes_without_slots_share_the_children_and_are_named():
    config = read("env.math.num_workers=40", "cluster.num_nodes=4", "env.placement.num_nodes=2")
    assert num_workers("math", config, num_cores=64) == 20
    text = describe_workers(config, num_cores=None)
    assert text.startswith(
        "one actor; workers on each of 2 further nodes without slots, whose cores are not known here"
    )


def test_nemo_gyms_environments_are_those_of_its_servers():
    config = read(name="grpo_nanov3.yaml")
    assert len(environments_of(config)) > 1 and "code" in environments_of(config)
    assert num_workers("math", config, num_cores=192) == 192 // len(environments_of(config))
    config.env.nemo_gym.servers = {"m": {"resources_servers": {"math_with_judge": {"should_use_judge": True}}}}
    assert "math" not in environments_of(config) and "code" in environments_of(config)
    # NeMo Gym's servers grade all.
    config.env.nemo_gym.embedded = False
    assert environments_of(config) == () and describe_workers(config, num_cores=8).endswith(
        "on 8 cores: none, agents give all rewards"
    )
    config.env.own.functions = {"mine": "a:b"}
    assert environments_of(config) == ("mine",) and num_workers("math", config, num_cores=64) == 64


def test_the_text_says_what_the_machine_lacks():
    config = read("env.math.num_workers=1024", "cluster.num_nodes=2")
    text = describe_workers(config, num_cores=8)
    assert text.startswith("one actor; workers on 8 cores: math 8; env.math.num_workers=1024 asks for 512 on a node")
    assert "asks for" not in describe_workers(config, num_cores=512)
    assert "asks for" not in describe_workers(read(), num_cores=1)


def test_a_check_names_the_environments_that_rows_ask_for(tmp_path: Path):
    def described(*rows: dict[str, object]) -> list[str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": "1+1=", **row}) + "\n" for row in rows))
        data = [f"data.train.data_path={tmp_path / 'rows.jsonl'}", "data.validation=null"]
        config = read(*data, "++env.own.agents.sums=a:b", "++env.own.functions.near=a:c")
        return [ROWS[name](config) for name in ("data", "rewards")]

    data, rewards = described({"env_name": "sums"}, {"env_name": "sums"})
    assert data.endswith("scored by sums") and rewards.endswith(": none, agents give all rewards")
    data, rewards = described({"answer": "2", "agent_ref": {"name": "carrying"}}, {"env_name": "near"})
    assert data.endswith("scored by math, near") and ": math " in rewards and ", near 1" in rewards


def test_cores_that_slurm_or_a_container_keeps_back_do_not_count():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, cores)
