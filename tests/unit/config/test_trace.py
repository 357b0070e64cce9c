import copy
import dataclasses
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mrl.config import trace
from mrl.config.load import load_config
from mrl.config.redact import resolved_yaml
from mrl.config.rules.checks import find_problems
from mrl.config.rules.ranges import FIXED
from mrl.config.schema.run import KEYS, RunConfig


@pytest.fixture(autouse=True)
def nothing_read() -> Iterator[None]:
    trace.forget_reads()
    yield
    trace.forget_reads()


def read_seed(config: RunConfig) -> trace.Readers:
    assert config.grpo.seed == 42
    return trace.readers()


def test_a_read_is_noted_by_its_dotted_key():
    config = load_config("grpo_tiny.yaml")
    assert trace.readers() == {}
    assert config.policy.megatron_cfg.optimizer.lr == 1e-3
    assert trace.readers() == {"policy.megatron_cfg.optimizer.lr": {__name__}}


def test_a_property_reads_the_keys_it_is_made_of():
    assert load_config("grpo_tiny.yaml").data_parallel_size == 2
    cluster = {"cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpu_units_per_node"}
    parallel = {f"policy.megatron_cfg.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")}
    assert set(trace.readers()) == cluster | parallel


def test_passing_a_section_on_reads_nothing():
    config = load_config("grpo_tiny.yaml")
    assert config.policy.generation.vllm_cfg is not None
    assert trace.readers() == {}


def test_walking_over_a_config_reads_nothing(workplace: Path):
    config = load_config("grpo_tiny.yaml")
    assert find_problems(config) == []
    resolved_yaml(config)
    repr(config)
    dataclasses.asdict(config)
    OmegaConf.structured(config)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config)
    assert trace.readers() == {}


def test_copies_are_traced_too():
    config = load_config("grpo_tiny.yaml")
    read_seed(pickle.loads(pickle.dumps(config)))
    assert dataclasses.replace(config.loss_fn, ratio_clip_min=0.1).ratio_clip_min == 0.1
    assert set(trace.readers()) == {"grpo.seed", "loss_fn.ratio_clip_min"}


def test_reads_of_another_process_are_merged():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        theirs = pool.submit(read_seed, load_config("grpo_tiny.yaml")).result(timeout=60)
    assert theirs == {"grpo.seed": {__name__}} and trace.readers() == {}
    trace.merge_readers(theirs)
    trace.merge_readers({"grpo.seed": ["mrl.train"]})
    assert trace.readers() == {"grpo.seed": {__name__, "mrl.train"}}


def test_reading_a_value_reads_what_it_was_made_from():
    config = load_config(
        "grpo_tiny.yaml", ["policy.logprob_batch_size=${add:${grpo.val_period},${max:1,${policy.train_micro_batch_size}}}"]
    )
    assert config.policy.generation.vllm_cfg.precision == "float32"
    assert config.policy.logprob_batch_size == 21
    expected = {"policy.generation.vllm_cfg.precision", "policy.precision", "policy.logprob_batch_size"}
    assert set(trace.readers()) == expected | {"grpo.val_period", "policy.train_micro_batch_size"}


def test_the_report_splits_all_keys():
    read_seed(load_config("grpo_tiny.yaml"))
    lines = trace.report().splitlines()
    assert lines[:2] == [f"Config keys read by this run: 1 of {len(KEYS)}", f"  grpo.seed: {__name__}"]
    assert lines[2] == f"Config keys fixed by a check: {len(FIXED)} of {len(KEYS)}"
    assert f"Config keys never read by this run: {len(KEYS) - 1 - len(FIXED)} of {len(KEYS)}" in lines
    assert sorted(line.strip().partition(":")[0] for line in lines if line.startswith("  ")) == sorted(KEYS)


def test_a_section_class_stands_at_one_place():
    assert len(set(KEYS.values())) == len(KEYS)
