# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.plan.deadlines import (
    all_deadlines,
    checkpoint_deadline,
    describe_engine_start,
    start_deadline,
    train_deadline,
    weight_bytes,
)
from tests.sources import ROOT

NANO3 = ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"


def run_on(model: Path, *, gpus_per_node: int = 0) -> RunConfig:
    return load_config("grpo_tiny.yaml", [f"policy.model_name={model}", f"cluster.gpus_per_node={gpus_per_node}"])


def shards(folder: Path, *sizes: int) -> Path:
    """A Hugging Face folder whose files take no room on the disk."""
    names = [f"model-{index}.safetensors" for index in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    index = {"weight_map": {f"{name}.{tensor}": name for name in names for tensor in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_tiny_model_has_the_five_minutes_of_its_processes(tmp_path: Path):
    deadline = start_deadline(run_on(shards(tmp_path, 2_000_000)))
    assert 300 <= deadline.seconds < 301
    assert str(deadline) == "start deadline 300 s: 300 s for processes"


def test_sixty_gigabytes_have_half_an_hour_on_gpus(tmp_path: Path):
    deadline = start_deadline(run_on(shards(tmp_path, *[5_000_000_000] * 12), gpus_per_node=8))
    assert deadline.seconds == 300 + 300 + 60_000 / 50
    assert str(deadline).startswith("start deadline 1,800 s: ")


def test_the_largest_model_decides_how_long_a_start_takes(tmp_path: Path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    small, large = shards(tmp_path / "small", 1_000_000_000), shards(tmp_path / "large", 60_000_000_000)
    for config, beside in (("ppo_tiny.yaml", "value"), ("distillation_tiny.yaml", "teacher")):
        for one, other in ((small, large), (large, small)):
            deadline = start_deadline(load_config(config, [f"policy.model_name={one}", f"{beside}.model_name={other}"]))
            assert deadline.seconds == 300 + 60_000 / 50
            assert str(deadline).endswith("60 GB of weights of the largest model at 50 MB/s")
        gone = start_deadline(
            load_config(config, [f"policy.model_name={small}", f"{beside}.model_name={tmp_path / 'nowhere'}"])
        )
        assert gone.seconds == 320 and str(gone).endswith("nowhere is added once they are here")


def test_a_folder_without_weights_is_judged_by_its_config(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(NANO3.read_bytes())
    num_bytes = weight_bytes(tmp_path)
    # The published folder of 31.6 billion parameters in bfloat16.
    assert num_bytes == pytest.approx(63.2e9, rel=0.01)
    assert 1800 < start_deadline(run_on(tmp_path, gpus_per_node=8)).seconds < 1900


def test_without_the_model_the_rest_is_told(tmp_path: Path):
    deadline = start_deadline(run_on(tmp_path / "nowhere", gpus_per_node=8))
    assert deadline.seconds == 600
    assert "read the weights of " in str(deadline) and str(deadline).endswith("nowhere is added once they are here")
    (tmp_path / "config.json").write_text("{")
    assert start_deadline(run_on(tmp_path)).seconds == 300


def test_what_the_config_says_wins(tmp_path: Path):
    folder = shards(tmp_path, 60_000_000_000)
    given = ["deadlines.start_s=42", "deadlines.train_s=43", "deadlines.checkpoint_s=44"]
    config = load_config("grpo_tiny.yaml", [f"policy.model_name={folder}", *given])
    assert [str(deadline) for deadline in all_deadlines(config)] == [
        "start deadline 42 s: deadlines.start_s",
        "train deadline 43 s: deadlines.train_s",
        "checkpoint deadline 44 s: deadlines.checkpoint_s",
    ]


def nano3(tmp_path: Path, *, nodes: int, rollouts: int = 16, length: int = 49152) -> RunConfig:
    (tmp_path / "config.json").write_bytes(NANO3.read_bytes())
    overrides = [
        f"policy.model_name={tmp_path}",
        f"cluster.num_nodes={nodes}",
        f"policy.max_total_sequence_length={length}",
    ]
    return load_config("grpo_nanov3.yaml", [*overrides, f"grpo.num_generations_per_prompt={rollouts}"])


def test_a_step_has_the_time_of_its_operations_on_its_gpus(tmp_path: Path):
    # 2,048 sequences of 49,152 tokens, four passes: 4e8 tokens. 3.2 billion parameters meet a token twice, and 6
    # attention layers of 32 heads of 128 meet half of its sequence with four operations, the scans of 23 Mamba layers
    # with 7 for each of 64 x 64 x 128.
    per_token = 2 * 3.2e9 + 6 * 2 * 32 * 128 * 49152 + 23 * 7 * 64 * 64 * 128
    by_hand = 4 * 2048 * 49152 * per_token / (256 * 30e12)
    seconds = train_deadline(nano3(tmp_path, nodes=32)).seconds
    assert seconds - 600 == pytest.approx(by_hand, rel=0.05)
    assert train_deadline(nano3(tmp_path, nodes=16)).seconds - 600 == pytest.approx(2 * (seconds - 600))
    assert train_deadline(nano3(tmp_path, nodes=32, rollouts=4)).seconds - 600 == pytest.approx((seconds - 600) / 4)
    assert train_deadline(nano3(tmp_path, nodes=32, length=4096)).seconds - 600 < (seconds - 600) / 12
    config = nano3(tmp_path, nodes=32)
    config.policy.train_global_batch_size = 64  # several updates a step: the logprob pass before them is the longest
    assert train_deadline(config).seconds - 600 == pytest.approx((seconds - 600) / 4)
    assert "for 8,192 forward passes of 49,152 tokens on 256 ranks at 30 TFLOPS" in str(
        train_deadline(nano3(tmp_path, nodes=32))
    )


def test_a_checkpoint_has_the_time_of_its_bytes_on_its_nodes(tmp_path: Path):
    # 31.6 billion parameters of 14 bytes.
    one, many = (checkpoint_deadline(nano3(tmp_path, nodes=nodes)) for nodes in (1, 32))
    assert one.seconds == pytest.approx(600 + 442e9 / 200e6, rel=0.01)
    assert many.seconds == pytest.approx(600 + 442e9 / 1.6e9, rel=0.01)
    assert str(many) == "checkpoint deadline 876 s: 600 s for a busy file system + 276 s for 442 GB at 1.6 GB/s"
    config = nano3(tmp_path, nodes=32)
    config.checkpointing.save_optimizer = False
    assert checkpoint_deadline(config).seconds == pytest.approx(600 + 63.2e9 / 1.6e9, rel=0.01)


def test_without_the_model_no_deadline_is_shorter_than_the_fixed_part(tmp_path: Path):
    config = run_on(tmp_path / "nowhere")
    assert [train_deadline(config).seconds, checkpoint_deadline(config).seconds] == [600, 600]
    assert "the time to compute is added once" in str(train_deadline(config))
    assert "the time to write is added once" in str(checkpoint_deadline(config))


def test_an_engines_start_says_what_it_captures():
    """Counts as vLLM 0.32 does; 51 sizes were seen for 512 sequences."""
    config = load_config("grpo_math_1B.yaml")
    assert [
        f"about {number} batch" in describe_engine_start(config, seqs)
        for seqs, number in ((128, 35), (512, 51), (1, 2))
    ] == [True] * 3
    config.policy.generation.vllm_kwargs["compilation_config"] = {"cudagraph_capture_sizes": [1, 8]}
    assert "about 2 batch" in describe_engine_start(config, 128)
    config.policy.generation.vllm_cfg.enforce_eager = True
    assert "without CUDA graphs" in describe_engine_start(config, 128)
    assert describe_engine_start(load_config("grpo_tiny.yaml"), 128) == ""


def test_an_evaluation_has_no_deadlines_of_training():
    config = load_config("grpo_tiny.yaml")
    assert [deadline.what for deadline in all_deadlines(config)] == ["start", "train", "checkpoint"]
    assert [deadline.what for deadline in all_deadlines(config, trains=False)] == ["start"]
