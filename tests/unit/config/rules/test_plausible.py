# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.files import packaged_configs
from mrl.config.load import load_config
from mrl.config.rules.plausible import DOUBTS, find_doubts
from tests.sources import ROOT
from tests.unit.config.problems import texts_of

LR = "policy.megatron_cfg.optimizer.lr"
MOE_30B = ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"
DOUBTFUL = [
    (f"{LR}=1e3", "destroys a trained model"),
    ("policy.megatron_cfg.optimizer.weight_decay=3.5", "faster than they learn"),
    ("loss_fn.reference_policy_kl_penalty=100", "outweighs rewards"),
    ("policy.generation.temperature=0.01", "teach nothing"),
    ("policy.generation.temperature=7", "noise"),
    ("policy.generation.top_k=1", "teach nothing"),
    ("policy.generation.vllm_kwargs.moe_backend=flashinfer_cutlass", "without effect: engines take triton"),
    ("policy.generation.max_new_tokens=2", "few answers are so short"),
    ("checkpointing.save_period=10", "checkpoints of steps without a validation have no"),
    ("cluster.gpus_per_node=256", "hosts have at most 16 GPUs"),
    ("policy.generation.colocated.resources.gpus_per_node=2", "it has no effect: engines share the policy's GPUs"),
    ("policy.generation.colocated.resources.num_nodes=1", "it has no effect: engines share the policy's GPUs"),
]
MEGATRON = "policy.megatron_cfg"
PACKING, DYNAMIC = "policy.sequence_packing", "policy.dynamic_batching"
LONG_ROWS = [
    # overrides, key=value, what a row should hold
    ([f"{PACKING}.train_mb_tokens=1279"], f"{PACKING}.train_mb_tokens=1279", 1280),
    ([f"{PACKING}.logprob_mb_tokens=1"], f"{PACKING}.logprob_mb_tokens=1", 1280),
    ([f"{PACKING}={{train_mb_tokens: 1280, sequence_length_round: 1024}}"], f"{PACKING}.train_mb_tokens=1280", 2048),
    (
        [
            f"{PACKING}.enabled=false",
            f"{DYNAMIC}={{enabled: true, sequence_length_round: 1000, train_mb_tokens: 1300}}",
        ],
        f"{DYNAMIC}.train_mb_tokens=1300",
        2000,
    ),
    (
        [
            "policy.megatron_cfg.context_parallel_size=2",
            "policy.max_total_sequence_length=1281",
            f"{PACKING}.train_mb_tokens=1284",
        ],
        f"{PACKING}.train_mb_tokens=1284",
        1288,
    ),
]
OTHERS = [
    # config, override, part of the doubt, what it needs beside; the first rule is that of NeMo RL's single controller
    ("grpo_tiny.yaml", "loss_fn.use_importance_sampling_correction=false", "as if the present weights had drawn them",
     ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"]),
    ("grpo_tiny.yaml", "policy.generation.vllm_cfg.precision=fp8", "rounded to FP8",
     ["loss_fn.use_importance_sampling_correction=false"]),
    ("grpo_tiny.yaml", "policy.megatron_cfg.fp8_cfg.fp8_recipe=mxfp8", "the trainer rounds what it multiplies to FP8",
     ["policy.megatron_cfg.fp8_cfg.enabled=true", "loss_fn.use_importance_sampling_correction=false"]),
    ("grpo_tiny.yaml", "checkpointing.keep_unfinished_s=30", "keeps no rollouts, and no unfinished ones",
     ["checkpointing.keep_rollouts_gb=0"]),
    ("grpo_tiny.yaml", "grpo.max_num_epochs=1", "data.difficulty_pools has no effect in the first epoch",
     ["data.difficulty_pools={hard: {threshold: 0}}"]),
    ("ppo_tiny.yaml", "ppo.policy_training_start_step=100", "only the critic learns",
     ["value.megatron_cfg.num_layers_in_first_pipeline_stage=4"]),
    ("distillation_tiny.yaml", "distillation.topk_logits_k=1", "the loss is 0 and nothing is learned", []),
    ("grpo_tiny.yaml", f"{MEGATRON}.moe_router_dtype=fp64", "rounds them on the way",
     [f"{MEGATRON}.moe_token_dispatcher_type=flex"]),
    ("grpo_tiny.yaml", f"{MEGATRON}.moe_flex_dispatcher_backend=hybridep", "no run on GPUs has shown it",
     [f"{MEGATRON}.moe_token_dispatcher_type=flex"]),
]  # fmt: skip


@pytest.mark.parametrize(("override", "reason"), DOUBTFUL)
def test_a_slip_is_a_warning_and_no_refusal(workplace: Path, override: str, reason: str):
    key = override.partition("=")[0]
    overrides = [override, f"{LR.removesuffix('lr')}min_lr=0"]
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", overrides))
    assert doubt.startswith(f"{key}=") and reason in doubt
    if not key.startswith("cluster"):  # whose number of GPUs no layout fits
        assert texts_of(load_config("grpo_tiny.yaml", overrides)) == []


def test_the_folder_of_other_runs_is_a_warning(workplace: Path):
    for name in ("a", "b", "step_3"):
        (workplace / "results" / name).mkdir(parents=True)
    for name in ("a", "b"):
        (workplace / "results" / name / "metrics.jsonl").touch()
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", ["checkpointing.checkpoint_dir=results"]))
    assert doubt.startswith("checkpointing.checkpoint_dir=results") and "of other runs (a, b)" in doubt
    assert find_doubts(load_config("grpo_tiny.yaml", ["checkpointing.checkpoint_dir=results/a"])) == []


@pytest.mark.parametrize(
    ("override", "off"),
    [
        ("policy.megatron_cfg.peft.dim=16", "policy.megatron_cfg.peft.enabled=false"),
        ("policy.megatron_cfg.optimizer.muon_momentum=0.5", "policy.megatron_cfg.optimizer.optimizer=adam"),
        ("logger.wandb.name=mine", "logger.wandb_enabled=false"),
    ],
)
def test_values_of_a_section_that_is_off_are_doubted(workplace: Path, override: str, off: str):
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", [override]))
    assert doubt == f"{override}: it has no effect: {off}; change that, or leave this out"
    assert find_doubts(load_config("grpo_tiny.yaml", [off])) == []


def test_every_doubt_is_tried():
    assert set(DOUBTS) == {override.partition("=")[0] for override, _ in (*DOUBTFUL, *(row[1:3] for row in OTHERS))}


@pytest.mark.parametrize(("name", "override", "reason", "beside"), OTHERS)
def test_a_slip_of_other_runs(workplace: Path, name: str, override: str, reason: str, beside: list[str]):
    config = load_config(name, [override, *beside])
    assert [doubt.startswith(override) and reason in doubt for doubt in find_doubts(config)] == [True]
    assert not any(problem.startswith(override) for problem in texts_of(config))


@pytest.mark.parametrize(("overrides", "start", "needed"), LONG_ROWS)
def test_a_row_that_is_shorter_than_a_sequence_may_be(workplace: Path, overrides: list[str], start: str, needed: int):
    """NeMo RL starts so, too: few sequences are as long as they may be."""
    config = load_config("grpo_tiny.yaml", overrides)
    doubt, *_ = find_doubts(config)
    assert doubt.startswith(f"{start}: ") and doubt.endswith(
        f"the run ends at a sequence of more; use at least {needed} there"
    )
    assert not any("_mb_tokens" in problem for problem in texts_of(config))


@pytest.mark.parametrize("override", ["distillation.topk_logits_k=2", "loss_fn.zero_outside_topk=true"])
def test_one_token_of_a_teacher_says_something_only_of_the_whole_vocabulary(workplace: Path, override: str):
    assert find_doubts(load_config("distillation_tiny.yaml", ["distillation.topk_logits_k=1", override])) == []


@pytest.mark.parametrize("name", sorted(path.name for path in packaged_configs().glob("*.yaml")))
def test_packaged_configs_are_plausible(workplace: Path, name: str):
    assert find_doubts(load_config(name)) == []


@pytest.mark.parametrize(
    ("overrides", "num_bytes"),
    [
        (
            ["cluster.num_nodes=1", "cluster.gpus_per_node=4", "policy.megatron_cfg.expert_model_parallel_size=1"],
            "126 GB",
        ),
        (["cluster.num_nodes=4"], None),
        (
            [
                "cluster.num_nodes=1",
                "policy.megatron_cfg.expert_model_parallel_size=1",
                "policy.megatron_cfg.peft.enabled=true",
            ],
            None,
        ),
    ],
)
def test_the_memory_of_the_gpus(workplace: Path, overrides: list[str], num_bytes: str | None):
    """Memory of 31.6 billion parameters at TP2 x PP2: 4 bytes of each for weights and gradients, 12 for optimizer."""
    model = workplace / "moe"
    model.mkdir()
    (model / "config.json").write_text(MOE_30B.read_text())
    doubts = find_doubts(
        load_config(
            "grpo_nanov3.yaml", ["policy.model_name=moe", "policy.megatron_cfg.context_parallel_size=1", *overrides]
        )
    )
    assert [f" take {num_bytes} on each of 4 GPUs; " in doubt for doubt in doubts] == [True] * (num_bytes is not None)


def test_an_8b_model_on_one_gpu(workplace: Path, llama_8b: Path):
    one = [f"policy.model_name={llama_8b}", "cluster.gpus_per_node=1"]
    (doubt,) = find_doubts(load_config("grpo_math_8B.yaml", one))
    # 8.03 billion parameters with 2 bytes of weights, 4 of gradients and 12 of optimizer.
    assert doubt.startswith(
        f"{one[0]}: weights, gradients and optimizer of 8.0 billion parameters take 145 GB on each of 1 GPU;"
    )
    optimizer = "policy.megatron_cfg.optimizer"
    offloaded = [
        f"{optimizer}.optimizer_cpu_offload=true",
        f"{optimizer}.optimizer_offload_fraction=1",
        f"{optimizer}.use_precision_aware_optimizer=true",
    ]
    assert find_doubts(load_config("grpo_math_8B.yaml", [*one, *offloaded])) == []
    assert find_doubts(load_config("grpo_math_8B.yaml", one[:1])) == []
