# SPDX-License-Identifier: Apache-2.0
import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError, Problem, Problems, value_at
from mrl.config.fields import Only, Range
from mrl.config.load import load_config
from mrl.config.rules.checks import check_disk, checkpoint_demand, find_problems, num_kept_at_most
from mrl.config.rules.layout import check_cluster
from mrl.config.schema.keys import KEYS
from mrl.config.schema.run import RunConfig
from scripts.config_page import markers
from tests.unit.config.problems import problems_of as found

MEGATRON, ENGINE, DEDICATED = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation.colocated"


def test_the_packaged_config_has_no_problem(workplace: Path):
    assert find_problems(load_config("grpo_tiny.yaml")) == []


def dedicated(**resources: int) -> str:
    return (
        f"{DEDICATED}={{enabled: false, resources: "
        f"{{{','.join(f'{key}: {value}' for key, value in resources.items())}}}}}"
    )


@pytest.mark.parametrize(("nodes", "engine_nodes", "tp", "num_engines"), [(4, 0, 8, 2), (4, 0, 16, 1), (4, 2, 8, 1)])
def test_engines_of_whole_nodes_that_fit(workplace: Path, nodes: int, engine_nodes: int, tp: int, num_engines: int):
    overrides = ["cluster.gpus_per_node=4", f"cluster.num_nodes={nodes}", f"{ENGINE}.tensor_parallel_size={tp}"]
    config = load_config("grpo_tiny.yaml", [*overrides, *([dedicated(num_nodes=engine_nodes)] if engine_nodes else [])])
    problems = Problems(config)
    check_cluster(config, problems)
    assert problems.merged == []
    assert (config.num_engines, config.nodes_of_engine) == (num_engines, tp // 4)


DEDICATED_LAYOUTS = [
    ([dedicated()], 4, 5, 1),
    ([dedicated(), f"{ENGINE}.tensor_parallel_size=2", "policy.generation.num_cpu_engines=3"], 4, 10, 3),
    (["cluster.gpus_per_node=8", dedicated(gpus_per_node=4)], 4, 8, 4),
    (["cluster.gpus_per_node=8", dedicated(gpus_per_node=4, num_nodes=1), f"{ENGINE}.tensor_parallel_size=2"], 4, 8, 2),
    (
        ["cluster.gpus_per_node=8", "cluster.num_nodes=4", dedicated(num_nodes=1), f"{ENGINE}.tensor_parallel_size=2"],
        24,
        32,
        4,
    ),
    (["cluster.gpus_per_node=8", "cluster.num_nodes=4", dedicated(num_nodes=3, gpus_per_node=8)], 8, 32, 24),
]


@pytest.mark.parametrize(("overrides", "num_policy_ranks", "num_slots", "num_engines"), DEDICATED_LAYOUTS)
def test_dedicated_engines_that_fit(
    workplace: Path, overrides: list[str], num_policy_ranks: int, num_slots: int, num_engines: int
):
    config = load_config("grpo_tiny.yaml", [*overrides, "grpo.num_generations_per_prompt=24"])
    assert find_problems(config) == []
    assert (config.num_policy_ranks, config.num_slots, config.num_engines) == (num_policy_ranks, num_slots, num_engines)
    assert config.data_parallel_size == num_policy_ranks // 2


def test_chunks_of_the_output_layer(workplace: Path):
    chunked = ("policy.logprob_chunk_size=2048",)
    fused = (f"{MEGATRON}.use_fused_linear_logprobs=true", f"{MEGATRON}.fused_linear_logprobs_chunk_size=512")
    for overrides, expected in (((), None), (chunked, 2048), (fused, 512)):
        config = load_config("grpo_tiny.yaml", overrides)
        assert find_problems(config) == []
        assert config.policy.output_chunk_tokens == expected


MARKERS = markers()


@pytest.mark.parametrize("written", ["too low", "nan", "inf", "-inf"])
def test_every_range_ends_somewhere(written: str):
    overrides, expected = ["reward_penalties.token_ids={unwanted: []}"], {}
    for key, allowed in MARKERS.items():
        if isinstance(allowed, Range) and not (allowed.low == -math.inf and written == "too low"):
            value = f"{allowed.low - 2 * (not allowed.is_low_open):g}" if written == "too low" else written
            overrides.append(f"{key}={value}")
            expected[key] = f"use a number that is {allowed}"
    problems = {problem.partition("=")[0]: problem for problem in found(*overrides)}
    # Whole numbers refuse what is not finite before their range does.
    rules = {
        key: (rule,) if written == "too low" else (rule, "must be a whole number") for key, rule in expected.items()
    }
    assert {key: problems[key] for key in rules if not any(rule in problems[key] for rule in rules[key])} == {}


def test_every_number_of_the_schema_has_a_range():
    numbers = {key for key in KEYS if type(value_at(RunConfig(), key)) in (int, float)}
    assert numbers - MARKERS.keys() == set()


@pytest.mark.parametrize("key", sorted(key for key, marker in MARKERS.items() if isinstance(marker, Only)))
def test_unsupported_values_are_refused(workplace: Path, key: str):
    marker = MARKERS[key]
    assert isinstance(marker, Only)
    other = not marker.value if isinstance(marker.value, bool) else marker.others[0]
    problems = found(f"{key}={other}")
    assert any(
        problem.startswith(f"{key}={str(other).lower()}: {marker.reason}; set it to ") for problem in problems
    ), problems


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": "deepseek_v2"},
        {"n_groups": 0},
        {"layer_norm_epsilon": 1e-6},
        {"hidden_size": "64"},
    ],
)
def test_a_model_that_is_not_supported(workplace: Path, change: dict[str, object]):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (problem,) = found()
    assert problem.startswith("policy.model_name=prepared/tiny/model: config.json: ") and next(iter(change)) in problem


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"model_type": "nemotron_h"}', "[" * 100_000])
def test_a_damaged_model_config(workplace: Path, text: str):
    (workplace / "prepared/tiny/model/config.json").write_text(text)
    (problem,) = found()
    assert problem.startswith("policy.model_name=prepared/tiny/model: ")


def test_a_run_that_keeps_all_its_checkpoints_needs_room_for_two(workplace: Path):
    for overrides, expected in (
        (("checkpointing.keep_top_k=null",), None),
        (("checkpointing.keep_top_k=8",), None),
        ((), 4),
    ):
        assert num_kept_at_most(load_config("grpo_tiny.yaml", overrides)) == expected
    steps = {"sft.max_num_steps=10": None, "sft.max_num_steps=1000": 4, "sft.max_num_steps=-1": 4}
    for override, expected in steps.items():
        sft = ["checkpointing.keep_top_k=3", "checkpointing.save_period=10", override]
        assert num_kept_at_most(load_config("sft_tiny.yaml", sft)) == expected


def test_the_predicted_size_of_a_checkpoint_is_that_of_a_real_one(workplace: Path):
    predicted = checkpoint_demand(load_config("grpo_tiny.yaml"), 366_728).checkpoint_bytes
    # `du -sb` of step_160 on 4 ranks: 7,467,378 bytes of shards, 140,974 of their metadata, 198,184 of the ledger.
    assert 7_848_539 <= predicted < 1.1 * 7_848_539


def test_no_room_for_checkpoints(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(workplace)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    (problem,) = found()
    assert problem.startswith("checkpointing.checkpoint_dir=results/grpo_tiny: 4 checkpoints of ")
    assert found("checkpointing.enabled=false") == []
    for step in range(4):  # room that is taken already is not asked for again
        (workplace / f"results/grpo_tiny/step_{step}").mkdir(parents=True)
    assert found() == []


VALUES = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1e30",
    "-1e30",
    ".nan",
    ".inf",
    "0.5",
    "null",
    "true",
    "false",
    "abc",
    "''",
    "[]",
    "[1]",
    "{}",
]
VALUES += [
    "{a: 1}",
    "${grpo.seed}",
    "${nope}",
    "${div:1,0}",
    "/dev/null/x",
    "x" * 5000,
    "1" * 30,
    "1:2:3:4",
    "~",
    "'\\0'",
]


def random_override(rng: random.Random) -> str:
    key = rng.choice(sorted(KEYS))
    if rng.random() < 0.2:
        position = rng.randrange(len(key))
        key = rng.choice(
            [key[:position] + rng.choice(".xyz_") + key[position + 1 :], key.rpartition(".")[0], key + ".more"]
        )
    return rng.choice(["", "", "", "+", "++", "~"]) + key + rng.choice(["=", "=", "=", ""]) + rng.choice(VALUES)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long("config")) for seed in range(1, 6))])
def test_broken_configs_give_nothing_but_config_errors(workplace: Path, seed: int):
    rng = random.Random(seed)
    num_bad = 0
    for _ in range(25):
        overrides = [random_override(rng) for _ in range(rng.choice([1, 1, 2, 5]))]
        try:
            problems = find_problems(load_config("grpo_tiny.yaml", overrides))
        except ConfigError as error:
            problems = error.problems
        num_bad += bool(problems)
        assert all(isinstance(problem, Problem) and str(problem) for problem in problems)
    assert num_bad > 12


def test_a_checkpoint_of_adapters_needs_less_disk(workplace: Path):
    messages = []
    for overrides in ([], ["policy.megatron_cfg.peft.enabled=true"]):
        problems = Problems(config := load_config("grpo_tiny.yaml", overrides))
        check_disk(config, 10**15, problems)
        messages += map(str, problems.merged)
    one = load_config("grpo_tiny.yaml", ["checkpointing.keep_top_k=null"])
    small = checkpoint_demand(load_config("grpo_tiny.yaml"), 10**5).text
    assert re.match(r"\d+ checkpoints? of 4\.1 MB and one being written need [\d.]+ MB more; ", small), small
    check_disk(one, 10**15, problems := Problems(one))
    assert re.search(r"1 checkpoint of .* need .* more, each later one .* \(all are kept\); ", str(problems.merged[0]))
    assert "checkpoints of 16000000 GB" in messages[0] and "checkpoints of 4000000 GB" in messages[1]
