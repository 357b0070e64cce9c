# SPDX-License-Identifier: Apache-2.0
"""A start is compared with its GPUs and its nodes: what surely does not fit is refused, and published runs are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.model import with_value
from mrl.ops.plan import main
from mrl.plan.facts import read_model
from mrl.plan.hardware import GIB, GPUS
from mrl.plan.memory import ROLLOUTS, host_memory, stage_states, with_limits
from mrl.plan.plan import make_plan, prediction
from tests.sources import ROOT

H100 = GPUS["h100-80g"]


def test_the_host_memory_of_a_node_is_compared(llama_8b: Path, capsys: pytest.CaptureFixture[str]):
    words = ["grpo_math_8B.yaml", f"policy.model_name={llama_8b}", "policy.megatron_cfg.tensor_model_parallel_size=2"]
    needs = host_memory(
        config := load_config(words[0], words[1:]), model := read_model(config), stage_states(config, model, 0)
    )
    # The 16 GB of model files are page cache, which the kernel gives back; the rest is not.
    # Rollouts are counted as if all were of the greatest length.
    least = (sum(needs.values()) - 2 * model.num_parameters - needs[ROLLOUTS]) / GIB
    assert main([*words, "--node-memory", str(least + 1)]) == 0
    said = capsys.readouterr().out
    kept, memory = (f"{number * GIB / 1e9:.0f}" for number in (least, least + 1))
    assert f"; surely {kept}, of {memory} that a node has\n" in said and "of host memory and has" not in said
    assert main([*words, "--node-memory", str(least - 1)]) == 2
    assert (
        f"a node needs at least {least:.1f} GiB of host memory and has {least - 1:.1f} GiB: checkpoint"
        in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=f"cluster.num_nodes=1: a node needs at least {least:.1f} GiB of host memory"):
        prediction(config, H100, (least - 1) * GIB)


@pytest.mark.parametrize(
    "cluster", [["cluster.num_nodes=2", "cluster.gpus_per_node=8"], ["cluster.num_nodes=1", "cluster.gpus_per_node=4"]]
)
def test_lora_of_seven_billion_fits_a_tutorials_gpus(tmp_path: Path, cluster: list[str]):
    """Covers NeMo RL's tutorial on EKS: LoRA with a KL, at 0.6 of GPUs of 40 GB, in pods of 384 GiB."""
    hub = json.loads((ROOT / "scripts/bench/models/hub.json").read_text())
    (sizes,) = (group["config"] for group in hub if "Qwen/Qwen2.5-7B" in group["ids"])
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    names = [f"policy.model_name={tmp_path}", f"policy.tokenizer.name={tmp_path}"]
    config = load_config(ROOT / "tests/data/nemo_rl/tutorial_002.yaml", [*names, *cluster])
    a100, slots = GPUS["a100-40g"], config.cluster.gpus_per_node
    assert make_plan(config, a100, node_memory=384 * GIB).misfit is None and "may not fit" not in prediction(
        config, a100, 384 * GIB
    )
    model = read_model(config)
    held = host_memory(config, model, stage_states(config, model, 0))
    # Adapters are switched off for the reference. While they are merged, the base of all linear layers waits on the
    # host, for each rank: queries and output, keys and values, and the three matrices of the MLP.
    elements = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert (held["weights of the reference"], held["base of adapted weights"]) == (0, 2 * elements * slots)
    only = with_value(config, "policy.megatron_cfg.peft.target_modules", ["linear_qkv"])
    assert stage_states(only, model, 0).base == 2 * 28 * (3584 * 3584 + 2 * 3584 * 512)
    share = with_limits(config, a100).policy.generation.vllm_cfg.gpu_memory_utilization
    assert 0.55 < share < 0.6 and with_limits(config, H100).policy.generation.vllm_cfg.gpu_memory_utilization == 0.6
