# SPDX-License-Identifier: Apache-2.0
import json
import math
import random
import shutil
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError, Problems, value_at
from mrl.config.fields import Only, Range
from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems, num_kept_at_most
from mrl.config.rules.layout import check_cluster
from mrl.config.schema.run import KEYS, RunConfig
from scripts.config_page import markers
from tests.unit.config.problems import problems_of as found

MEGATRON, ENGINE, DEDICATED = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation.colocated"


def test_the_packaged_config_has_no_problem(workplace: Path):
    assert find_problems(load_config("grpo_tiny.yaml")) == []


LAYOUTS = [
    (2, 2, 1, 2, 4),
    (1, 1, 1, 1, 1),
    (1, 1, 1, 2, 2),
    (2, 1, 1, 1, 2),
    (2, 1, 1, 2, 2),
    (1, 1, 1, 4, 4),
    (2, 2, 2, 4, 8),
    (1, 1, 8, 1, 8),
]


@pytest.mark.parametrize(("tp", "pp", "cp", "ep", "units"), LAYOUTS)
def test_layouts_that_fit(workplace: Path, tp: int, pp: int, cp: int, ep: int, units: int):
    sizes = [f"{MEGATRON}.tensor_model_parallel_size={tp}", f"{MEGATRON}.pipeline_model_parallel_size={pp}"]
    sizes += [f"{MEGATRON}.context_parallel_size={cp}"]
    sizes += [f"{MEGATRON}.expert_model_parallel_size={ep}", f"cluster.cpu_units_per_node={units}"]
    sizes += [f"{MEGATRON}.sequence_parallel={tp > 1}"]
    sizes += [f"{MEGATRON}.num_layers_in_first_pipeline_stage=3"] if pp == 2 else []
    assert found(*sizes) == []


def dedicated(**resources: int) -> str:
    return f"{DEDICATED}={{enabled: false, resources: {resources}}}"


# overrides; policy ranks, units, engines
WHOLE_NODES = [
    # nodes, nodes of dedicated engines, TP of an engine; engines
    (4, 0, 8, 2),
    (4, 0, 16, 1),
    (4, 2, 8, 1),
]


@pytest.mark.parametrize(("nodes", "engine_nodes", "tp", "num_engines"), WHOLE_NODES)
def test_engines_of_whole_nodes_that_fit(workplace: Path, nodes: int, engine_nodes: int, tp: int, num_engines: int):
    overrides = ["cluster.gpus_per_node=4", f"cluster.num_nodes={nodes}", f"{ENGINE}.tensor_parallel_size={tp}"]
    config = load_config("grpo_tiny.yaml", [*overrides, *([dedicated(num_nodes=engine_nodes)] if engine_nodes else [])])
    problems = Problems(config)
    check_cluster(config, problems)
    assert problems.texts == []
    assert (config.num_engines, config.nodes_of_engine) == (num_engines, tp // 4)


DEDICATED_LAYOUTS = [
    ([dedicated()], 4, 5, 1),
    ([dedicated(), f"{ENGINE}.tensor_parallel_size=2", "policy.generation.num_cpu_engines=3"], 4, 10, 3),
    (["cluster.gpus_per_node=8", dedicated(gpus_per_node=4)], 4, 8, 4),
    (["cluster.gpus_per_node=8", dedicated(gpus_per_node=4, num_nodes=1), f"{ENGINE}.tensor_parallel_size=2"], 4, 8, 2),
    (["cluster.gpus_per_node=8", "cluster.num_nodes=4", dedicated(num_nodes=1), f"{ENGINE}.tensor_parallel_size=2"], 24, 32, 4),
    (["cluster.gpus_per_node=8", "cluster.num_nodes=4", dedicated(num_nodes=3, gpus_per_node=8)], 8, 32, 24),
]


@pytest.mark.parametrize(("overrides", "num_policy_ranks", "num_slots", "num_engines"), DEDICATED_LAYOUTS)
def test_dedicated_engines_that_fit(workplace: Path, overrides: list[str], num_policy_ranks: int, num_slots: int, num_engines: int):
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


def test_truncated_sampling_is_allowed(workplace: Path):
    assert found("policy.generation.top_p=0.9", "policy.generation.top_k=20") == []


BAD = [
    # overrides, key=value, part of the way out
    (["policy.model_name=nowhere"], "policy.model_name=nowhere", "give the folder of a Hugging Face model, or its id"),
    (["policy.tokenizer.name=nowhere"], "policy.tokenizer.name=nowhere", "tokenizer"),
    (["data.train.data_path=nowhere.jsonl"], "data.train.data_path=nowhere.jsonl", "correct the path: it names a .jsonl, .json, .parquet"),
    (["data.validation.data_path=no/such/file"], "data.validation.data_path=no/such/file", "correct the path"),
    (["data.default.system_prompt_file=no.txt"], "data.default.system_prompt_file=no.txt", "correct the path"),
    (["data.default.env_name=maths"], "data.default.env_name=maths", "use one of math"),
    (["checkpointing.checkpoint_dir=prepared/tiny/model/config.json/x"], "checkpointing.checkpoint_dir=prepared", "choose a folder"),
    (["logger.log_dir=prepared/tiny/data/train.jsonl/x"], "logger.log_dir=prepared/tiny/data/train.jsonl/x", "choose a folder"),
    (["checkpointing.metric_name=accuracy"], "checkpointing.metric_name=accuracy", "val:accuracy"),
    (["data.validation=null"], "checkpointing.metric_name=val:accuracy", "train:reward"),
    (["policy.model_name=there/prepared/tiny/model"], "policy.model_name=there/prepared", "`python -m mrl.prepare tiny` makes it"),
    (["policy.model_name=prepared/tiny_dense/model"], "policy.model_name=prepared", "`python -m mrl.prepare tiny_dense` makes it"),
    (["data.train.data_path=prepared/tiny/data/no.jsonl"], "data.train.data_path=prepared/tiny", "path (`python -m mrl.prepare"),
    (["checkpointing.checkpoint_must_save_by=3h"], "checkpointing.checkpoint_must_save_by=3h", "00:03:40:00"),
    (["profiler.steps=[3]", "profiler.ranks=[0, 4]"], "profiler.ranks=[0, 4]", "use ranks from 0 to 3"),
    (["profiler.steps=[0]"], "profiler.steps=[0]", "use steps from there on"),
    (["profiler.steps=[3]", "profiler.tool=nsys"], "profiler.tool=nsys", "set it to torch"),
    (["cluster.master_port_range_low=1400"], "cluster.master_port_range_low=1400", "set both"),
    (["cluster.master_port_range_low=1400", "cluster.master_port_range_high=1400"], "cluster.master_port_range_low=1400", "set both"),
    (["cluster.master_port_range_low=80", "cluster.master_port_range_high=90"], "cluster.master_port_range_low=80", "at least 1024"),
    ([f"{ENGINE}.kv_cache_dtype=bfloat16"], f"{ENGINE}.kv_cache_dtype=bfloat16", "set it to auto"),
    ([f"{ENGINE}.logprobs_mode=raw_logprobs"], f"{ENGINE}.logprobs_mode=raw_logprobs", "processed_logprobs"),
    (["checkpointing.ft_save_period=5"], "checkpointing.ft_save_period=5", "set it"),
    (["grpo.stop_at_validation_metric=accuracy"], "grpo.stop_at_validation_metric=accuracy", "set both"),
    (["grpo.stop_at_validation_threshold=0.5"], "grpo.stop_at_validation_threshold=0.5", "set both"),
    (["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.5", "checkpointing.metric_name=null",
      "data.validation=null"],
     "grpo.stop_at_validation_metric=accuracy", "give data.validation"),
    (["policy.train_global_batch_size=96"], "policy.train_global_batch_size=96: the 512 rollouts", "leave the latter out"),
    (["grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=3"],
     "grpo.num_prompts_per_step=1: an update", "grpo.num_prompts_per_step"),
    (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt=1", "at least 2"),
    (["loss_fn.truncated_importance_sampling_ratio=2", "loss_fn.use_importance_sampling_correction=false"],
     "loss_fn.truncated_importance_sampling_ratio=2", "set it to null"),
    (["policy.logprob_chunk_size=64", f"{MEGATRON}.use_fused_linear_logprobs=true"],
     "policy.logprob_chunk_size=64", "the one or the other"),
    (["policy.generation.max_new_tokens=1281"], "policy.generation.max_new_tokens=1281", "lower the one or raise the other"),
    ([f"{ENGINE}.max_model_len=1281"], f"{ENGINE}.max_model_len=1281", "leave it out"),
    (["policy.dynamic_batching.enabled=true"], "policy.dynamic_batching.enabled=true", "set one of them to false"),
    (["policy.max_total_sequence_length=4097", "policy.sequence_packing={train_mb_tokens: 5000, logprob_mb_tokens: 5000}"],
     f"{ENGINE}.max_model_len=4097", "lower policy.max_total_sequence_length"),
    ([f"{ENGINE}.enforce_eager=false"], f"{ENGINE}.enforce_eager=false", "set it to true"),
    ([f"{ENGINE}.max_num_batched_tokens=64", f"{ENGINE}.max_num_seqs=128"], f"{ENGINE}.max_num_batched_tokens=64", "at least 128"),
    ([f"{ENGINE}.load_format=dummy"], f"{ENGINE}.load_format=dummy", "leave it out"),
    (["policy.generation.stop_token_ids=[1,-2]"], "policy.generation.stop_token_ids=[1, -2]", "at least 0"),
    (["policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=false"], f"{MEGATRON}.optimizer.bf16=false", "set it to true"),
    (["policy.max_grad_norm=3.0", f"{MEGATRON}.optimizer.clip_grad=2.0"], f"{MEGATRON}.optimizer.clip_grad=2.0", "leave it out"),
    ([f"{MEGATRON}.optimizer.min_lr=1e-2"], f"{MEGATRON}.optimizer.min_lr=0.01", "lower it"),
    ([f"{MEGATRON}.scheduler.lr_warmup_init=1"], f"{MEGATRON}.scheduler.lr_warmup_init=1.0", "lower it"),
    (
        [f"{MEGATRON}.scheduler.lr_decay_iters=50", f"{MEGATRON}.scheduler.lr_warmup_iters=50"],
        f"{MEGATRON}.scheduler.lr_warmup_iters=50",
        "at most 49",
    ),
    ([f"{MEGATRON}.scheduler.end_weight_decay=0.1"], f"{MEGATRON}.scheduler.end_weight_decay=0.1", "leave both out"),
    ([f"{MEGATRON}.optimizer.use_distributed_optimizer=false"], f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=true",
     "set it to false"),
    (
        [f"{MEGATRON}.optimizer.optimizer_cpu_offload=true"],
        f"{MEGATRON}.optimizer.optimizer_cpu_offload=true",
        "set policy.megatron_cfg.optimizer.bf16=true, or it to false",
    ),
    ([f"{MEGATRON}.optimizer.optimizer_offload_fraction=1.5"], f"{MEGATRON}.optimizer.optimizer_offload_fraction=1.5", "at most 1"),
    ([f"{MEGATRON}.tensor_model_parallel_size=4"], f"{MEGATRON}.tensor_model_parallel_size=4", "use 1 or 2"),
    ([f"{MEGATRON}.tensor_model_parallel_size=3"], f"{MEGATRON}.tensor_model_parallel_size=3", "use 1 or 2"),
    ([f"{MEGATRON}.expert_model_parallel_size=3"], f"{MEGATRON}.expert_model_parallel_size=3", "use 1, 2, 4 or 8"),
    ([f"{MEGATRON}.expert_model_parallel_size=8"], f"{MEGATRON}.expert_model_parallel_size=8: the 4 slots", "cluster.num_nodes"),
    ([f"{MEGATRON}.expert_tensor_parallel_size=3"], f"{MEGATRON}.expert_tensor_parallel_size=3", "use 1, 2, 4"),
    ([f"{MEGATRON}.context_parallel_size=3", "cluster.cpu_units_per_node=6"], f"{MEGATRON}.context_parallel_size=3", "use 1, 2 or 4"),
    ([f"{MEGATRON}.context_parallel_size=4"], f"{MEGATRON}.context_parallel_size=4: the 4 slots", "change one of these sizes"),
    ([f"{MEGATRON}.pipeline_model_parallel_size=2"], f"{MEGATRON}.pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage"),
    ([f"{MEGATRON}.pipeline_model_parallel_size=8"], f"{MEGATRON}.pipeline_model_parallel_size=8", "num_layers_in_first_pipeline_stage"),
    ([f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.num_layers_in_first_pipeline_stage=8"],
     f"{MEGATRON}.pipeline_model_parallel_size=2: the first and last stage are given 8 layers, and the model has 7", "rest divides"),
    (["cluster.cpu_units_per_node=8", f"{MEGATRON}.pipeline_model_parallel_size=4", f"{MEGATRON}.num_layers_in_first_pipeline_stage=2"],
     f"{MEGATRON}.pipeline_model_parallel_size=4: the other 3 stages need equal numbers of layers, and 5 of the model's 7 are", "divides"),
    ([f"{MEGATRON}.num_layers_in_last_pipeline_stage=3"], f"{MEGATRON}.num_layers_in_last_pipeline_stage=3", "set both to null"),
    ([f"{MEGATRON}.sequence_parallel=false"], f"{MEGATRON}.sequence_parallel=false", "set it to true"),
    ([f"{MEGATRON}.tensor_model_parallel_size=1"], f"{MEGATRON}.sequence_parallel=true", "set it to false"),
    (["cluster.cpu_units_per_node=3"], "cluster.cpu_units_per_node=3: the 3 slots", "cluster.cpu_units_per_node"),
    ([f"{ENGINE}.tensor_parallel_size=4"], f"{ENGINE}.tensor_parallel_size=4", "use 1 or 2"),
    ([f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.expert_parallel_size=3"],
     f"{ENGINE}.expert_parallel_size=3: must be 1 or a multiple of policy.generation.vllm_cfg.tensor_parallel_size=2", "use 1, 2 or 4"),
    ([f"{ENGINE}.expert_parallel_size=2", f"{ENGINE}.pipeline_parallel_size=2"],
     f"{ENGINE}.expert_parallel_size=2: above policy.generation.vllm_cfg.tensor_parallel_size=1 it makes groups", "or one stage"),
    ([f"{ENGINE}.expert_parallel_size=2", "++policy.generation.vllm_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}"],
     f"{ENGINE}.expert_parallel_size=2: above policy.generation.vllm_cfg.tensor_parallel_size=1 it makes groups", "or leave that out"),
    ([f"{ENGINE}.expert_parallel_size=2", "++policy.generation.vllm_kwargs.all2all_backend=deepep_low_latency"],
     "policy.generation.vllm_kwargs.all2all_backend=", "set it to allgather_reducescatter"),
    (["cluster.gpus_per_node=8", f"{ENGINE}.expert_parallel_size=6", f"{ENGINE}.tensor_parallel_size=2"],
     f"{ENGINE}.expert_parallel_size=6: nodes hold whole engines or engines whole nodes, and {ENGINE}.expert_parallel_size=6 divides",
     "use 1, 2, 4 or 8"),
    ([f"{ENGINE}.pipeline_parallel_size=2"], f"{ENGINE}.pipeline_parallel_size=2: stage 1 of the model's 7 layers would have none with"
     " attention", "use fewer stages"),
    (["cluster.gpus_per_node=8", f"{ENGINE}.pipeline_parallel_size=3", f"{ENGINE}.tensor_parallel_size=2"],
     f"{ENGINE}.tensor_parallel_size=2: nodes hold whole engines or engines whole nodes, and", "use 1, 2, 4 or 8 workers"),
    ([f"{ENGINE}.env_vars={{VLLM_PP_LAYER_PARTITION: '5,2'}}"], f"{ENGINE}.env_vars.VLLM_PP_LAYER_PARTITION", "remove it"),
    ([f"{ENGINE}.env_vars={{VLLM_DP_SIZE: '2'}}"], f"{ENGINE}.env_vars.VLLM_DP_SIZE", "remove it"),
    (["++policy.generation.vllm_kwargs.data_parallel_rank=1"], "policy.generation.vllm_kwargs.data_parallel_rank", "remove the key"),
    (["policy.generation.num_cpu_engines=5"], "policy.generation.num_cpu_engines=5", "lower it"),
    ([f"{DEDICATED}.enabled=false", f"{DEDICATED}.resources.num_nodes=1"], f"{DEDICATED}.resources.num_nodes=1", "set it to null"),
    (["cluster.gpus_per_node=8", f"{DEDICATED}.enabled=false"], f"{DEDICATED}.resources.gpus_per_node=null", "use 1 to 7"),
    (["cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{gpus_per_node: 8}}}}"],
     f"{DEDICATED}.resources.gpus_per_node=8", "use 1 to 7"),
    (["cluster.gpus_per_node=1", f"{DEDICATED}.enabled=false"], f"{DEDICATED}.resources.gpus_per_node=null", "enabled=true"),
    (["cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{gpus_per_node: 4, num_nodes: 2}}}}"],
     f"{DEDICATED}.resources.num_nodes=2", "set it to null"),
    (["cluster.num_nodes=4", "cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{num_nodes: 4}}}}"],
     f"{DEDICATED}.resources.num_nodes=4", "use 1 to 3"),
    (["cluster.num_nodes=4", "cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{gpus_per_node: 4, num_nodes: 1}}}}"],
     f"{DEDICATED}.resources.gpus_per_node=4", "set it to null"),
    (["cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{gpus_per_node: 6}}}}", f"{ENGINE}.tensor_parallel_size=4"],
     f"{ENGINE}.tensor_parallel_size=4", "use 1, 2, 3 or 6"),
    (["cluster.gpus_per_node=8", f"{DEDICATED}={{enabled: false, resources: {{gpus_per_node: 1}}}}"],
     "cluster.gpus_per_node=8: the 7 slots", "change one of these sizes"),
    (["cluster.gpus_per_node=8", f"{ENGINE}.tensor_parallel_size=3"], f"{ENGINE}.tensor_parallel_size=3", "use 1, 2, 4 or 8"),
    (["cluster.gpus_per_node=4", "cluster.num_nodes=4", f"{ENGINE}.tensor_parallel_size=12"],
     f"{ENGINE}.tensor_parallel_size=12", "use 1, 2, 4, 8 or 16"),
    (["cluster.gpus_per_node=4", "cluster.num_nodes=2", f"{ENGINE}.tensor_parallel_size=6"], f"{ENGINE}.tensor_parallel_size=6", "4 or 8"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "setting", "way_out"), BAD, ids=lambda value: str(value)[:60])
def test_a_problem_names_key_value_and_way_out(workplace: Path, overrides: list[str], setting: str, way_out: str):
    problems = found(*overrides)
    assert any(problem.startswith(setting) and way_out in problem.partition(";")[2] for problem in problems), problems


MARKERS = markers()


@pytest.mark.parametrize("written", ["too low", ".nan", ".inf", "-.inf"])
def test_every_range_ends_somewhere(written: str):
    overrides, expected = ["reward_penalties.token_ids={unwanted: []}"], {}
    for key, allowed in MARKERS.items():
        if isinstance(allowed, Range) and not (allowed.low == -math.inf and written == "too low"):
            value = f"{allowed.low - 2 * (not allowed.is_low_open):g}" if written == "too low" else written
            overrides.append(f"{key}={value}")
            expected[key] = f"use a number that is {allowed}"
    problems = {problem.partition("=")[0]: problem for problem in found(*overrides)}
    # Whole numbers refuse what is not finite before their range does.
    rules = {key: (rule,) if written == "too low" else (rule, "must be a whole number") for key, rule in expected.items()}
    assert {key: problems[key] for key in rules if not any(rule in problems[key] for rule in rules[key])} == {}


def test_every_number_of_the_schema_has_a_range():
    numbers = {key for key in KEYS if type(value_at(RunConfig(), key)) in (int, float)}
    assert numbers - MARKERS.keys() == set()


@pytest.mark.parametrize("key", sorted(key for key, marker in MARKERS.items() if isinstance(marker, Only)))
def test_unsupported_values_are_refused(workplace: Path, key: str):
    marker = MARKERS[key]
    assert isinstance(marker, Only)
    other = not marker.value if isinstance(marker.value, bool) else 5
    problems = found(f"{key}={other}")
    assert any(problem.startswith(f"{key}={str(other).lower()}: {marker.reason}; set it to ") for problem in problems), problems


def test_all_problems_come_at_once(workplace: Path):
    assert len(find_problems(load_config("grpo_tiny.yaml", [override for overrides, _, _ in BAD[:8] for override in overrides]))) >= 8


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt2"}, {"model_type": "deepseek_v3"}, {"n_groups": 0}, {"layer_norm_epsilon": 1e-6}, {"hidden_size": "64"}]
)
def test_a_model_that_is_not_supported(workplace: Path, change: dict[str, object]):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (problem,) = found()
    assert problem.startswith("policy.model_name=prepared/tiny/model: config.json: ") and next(iter(change)) in problem


def test_engines_need_experts_to_spread(workplace: Path):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hybrid_override_pattern": "M-M*-M-"}))
    engines = [f"{MEGATRON}.expert_model_parallel_size=1", f"{ENGINE}.tensor_parallel_size=2"]
    assert found(*engines) == []
    (problem,) = found(*engines, f"{ENGINE}.expert_parallel_size=2")
    assert problem.startswith(f"{ENGINE}.expert_parallel_size=2: the model has 0 experts") and problem.endswith("set it to 1")


def test_stages_of_an_engine_that_each_have_all_kinds_of_layers(workplace: Path):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hybrid_override_pattern": "M*EM*EM"}))
    assert found(f"{ENGINE}.pipeline_parallel_size=2", f"{ENGINE}.tensor_parallel_size=2") == []
    wrong = {
        f"{ENGINE}.pipeline_parallel_size=4": "stage 0 of the model's 7 layers would have none with experts",
        "policy.router_replay.enabled=true": "vLLM tells no routes of an engine with pipeline stages",
        "++policy.generation.vllm_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}": "proposed tokens are proven only",
    }
    for override, rule in wrong.items():
        (problem,) = found(f"{ENGINE}.pipeline_parallel_size=2", override)
        assert problem.startswith(f"{ENGINE}.pipeline_parallel_size=") and rule in problem


def test_routes_need_experts(workplace: Path):
    path = workplace / "prepared/tiny/model/config.json"
    assert found("policy.router_replay.enabled=true") == []
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hybrid_override_pattern": "M-M*-M-"}))
    (problem,) = found("policy.router_replay.enabled=true", f"{MEGATRON}.expert_model_parallel_size=1")
    assert problem == "policy.router_replay.enabled=true: the model has no experts, so nothing is routed; set it to false"


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"model_type": "nemotron_h"}', "[" * 100_000])
def test_a_damaged_model_config(workplace: Path, text: str):
    (workplace / "prepared/tiny/model/config.json").write_text(text)
    (problem,) = found()
    assert problem.startswith("policy.model_name=prepared/tiny/model: ")


def test_a_run_that_keeps_all_its_checkpoints_needs_room_for_two(workplace: Path):
    for overrides, expected in ((("checkpointing.keep_top_k=null",), None), (("checkpointing.keep_top_k=8",), None), ((), 4)):
        assert num_kept_at_most(load_config("grpo_tiny.yaml", overrides)) == expected


def test_no_room_for_checkpoints(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(workplace)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    (problem,) = found()
    assert problem.startswith("checkpointing.checkpoint_dir=results/grpo_tiny: 4 checkpoints of ")
    assert found("checkpointing.enabled=false") == []
    for step in range(4):  # room that is taken already is not asked for again
        (workplace / f"results/grpo_tiny/step_{step}").mkdir(parents=True)
    assert found() == []


VALUES = ["0", "-1", "1", "2", "3", "7", "1e30", "-1e30", ".nan", ".inf", "0.5", "null", "true", "false", "abc", "''", "[]", "[1]", "{}"]
VALUES += ["{a: 1}", "${grpo.seed}", "${nope}", "${div:1,0}", "/dev/null/x", "x" * 5000, "1" * 30, "1:2:3:4", "~", "'\\0'"]


def random_override(rng: random.Random) -> str:
    key = rng.choice(sorted(KEYS))
    if rng.random() < 0.2:
        position = rng.randrange(len(key))
        key = rng.choice([key[:position] + rng.choice(".xyz_") + key[position + 1 :], key.rpartition(".")[0], key + ".more"])
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
        assert all(isinstance(problem, str) and problem for problem in problems)
    assert num_bad > 12


@pytest.mark.parametrize(("pattern", "is_refused"), [("MEM*E-E", True), ("MEM*EME", False)])
def test_the_width_of_an_mlp_counts_where_there_is_one(workplace: Path, pattern: str, is_refused: bool):
    path = workplace / "prepared/tiny/model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hybrid_override_pattern": pattern, "intermediate_size": 129}))
    problems = found()
    assert [problem for problem in problems if "129 columns of an MLP" in problem] == (problems if is_refused else [])
    assert len(problems) == is_refused
