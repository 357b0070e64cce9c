"""Which code reads which config key, in runs that differ in all that matters. Writes docs/data/config_reads.json, for docs/config.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config import trace
from mrl.config.load import load_config
from mrl.config.schema.run import KEYS
from mrl.data.prompts import load_prompts
from mrl.envs.registry import build_environment
from scripts.config_page import DATA, unread_keys
from tests.long.record import record

pytestmark = [pytest.mark.long("config_reads"), pytest.mark.timeout(3000)]

MEGATRON = "policy.megatron_cfg"
SMALL = ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8", "grpo.max_num_steps=2", "checkpointing.save_period=1"]
SMALL += ["grpo.max_val_samples=4", "grpo.val_period=1"]
SUPERVISED = ["policy.train_global_batch_size=16", "checkpointing.save_period=1"]
# Each run has features that the others do not; together they go everywhere that a host without GPUs can.
RUNS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo_tiny.yaml", [*SMALL, "loss_fn.reference_policy_kl_penalty=0.01", "logger.tensorboard_enabled=true"]),
    "variants": (
        "grpo_tiny.yaml",
        [
            *SMALL,
            "checkpointing.save_period=2",
            "checkpointing.ft_save_period=1",
            "checkpointing.ft_keep_latest_k=1",
            "policy.router_replay.enabled=true",
            "policy.sequence_packing.enabled=false",
            "policy.dynamic_batching.enabled=true",
            f"{MEGATRON}.peft.enabled=true",
            f"{MEGATRON}.activation_checkpointing=true",
            f"{MEGATRON}.recompute_granularity=selective",
            f"{MEGATRON}.defer_fp32_logits=true",
            f"{MEGATRON}.use_fused_linear_logprobs=true",
            f"{MEGATRON}.moe_router_load_balancing_type=aux_loss",
            f"{MEGATRON}.moe_aux_loss_coeff=1e-3",
            f"{MEGATRON}.moe_router_bias_update_rate=1e-3",
            f"{MEGATRON}.moe_per_layer_logging=true",
            "logger.wandb_enabled=true",
            "logger.swanlab_enabled=true",
            "logger.mlflow_enabled=true",
            "logger.mlflow.tracking_uri=mlruns",
            "logger.num_val_samples_to_print=1",
        ],
    ),
    "family": (
        "grpo_tiny.yaml",
        [
            *SMALL,
            "policy.generation.colocated.enabled=false",
            "grpo.async_grpo.enabled=true",
            "grpo.async_grpo.in_flight_weight_updates=true",
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
            "grpo.use_dynamic_sampling=true",
            "grpo.overlong_filtering=true",
            "grpo.seq_logprob_error_threshold=2",
            "grpo.advantage_clip_low=-5",
            "grpo.advantage_clip_high=5",
            "grpo.reward_scaling.enabled=true",
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 4, overlong_buffer_penalty: 1, max_response_length: 16}",
            "grpo.val_num_generations_per_prompt=2",
            "grpo.stop_at_validation_metric=pass_k",
            "grpo.stop_at_validation_threshold=2",
            "loss_fn.truncated_importance_sampling_ratio=2",
            "loss_fn.truncated_importance_sampling_type=icepop",
            "loss_fn.truncated_importance_sampling_ratio_min=0.5",
            "loss_fn.ratio_clip_c=3",
        ],
    ),
    "gspo": (
        "grpo_tiny.yaml",
        [
            *SMALL,
            "grpo.val_period=0",
            "grpo.val_at_end=true",
            "grpo.adv_estimator.name=reinforce_plus_plus",
            "loss_fn.token_level_loss=false",
            "policy.sequence_packing.enabled=false",
            "reward_penalties={penalize_unwanted_tokens: true, token_ids: {unwanted: [1], think_open: 2, think_close: 3}}",
        ],
    ),
    "components": (
        "grpo_tiny.yaml",
        [
            *SMALL,
            "grpo.max_num_steps=1",
            "grpo.adv_estimator={name: gdpo, reward_weights: [1.0, 0.5]}",
            "++env.own.functions.parts=tests.long.record:two_components",
            "data.default.env_name=parts",
        ],
    ),
    "sft": ("sft_tiny.yaml", [*SUPERVISED, "sft.max_num_steps=2", "sft.val_period=2"]),
    "dpo": ("dpo_tiny.yaml", [*SUPERVISED, "dpo.max_num_steps=2", "dpo.val_period=2"]),
    "rm": ("rm_tiny.yaml", [*SUPERVISED, "rm.max_num_steps=2", "rm.val_period=2"]),
    "evaluation": ("grpo_tiny.yaml", ["grpo.max_val_samples=8"]),
}
ENVIRONMENTS = ["math", "mcqa", "code", "instruction_following", "structured_outputs", "workplace_assistant", "tests.long.record:commit"]


def test_every_key_is_read_in_some_run_or_needs_a_gpu(tmp_path: Path):
    found = {"environments": readers_of_environments()}
    python(tmp_path, "-m", "mrl.prepare", "tiny")
    found["data"] = readers_of_data(tmp_path)
    for name, (config, overrides) in RUNS.items():
        module = "mrl.evaluate" if name == "evaluation" else "mrl.train"
        console = python(tmp_path, "-m", module, config, "--trace-config", f"checkpointing.checkpoint_dir=results/{name}", *overrides)
        found[name] = readers_in(console)
    readers: dict[str, set[str]] = {}
    for of_run in found.values():
        for key, modules in of_run.items():
            readers.setdefault(key, set()).update(modules)
    rows = [{"run": name, "what": described(name), "keys read": len(of_run), "of": len(KEYS)} for name, of_run in found.items()]
    record("config_reads", rows, readers={key: sorted(modules) for key, modules in sorted(readers.items())})
    assert unread_keys(json.loads(DATA.read_text())["readers"]) == set()


def described(name: str) -> str:
    """What a user types for a run."""
    config, overrides = RUNS.get(name, ("in one process, without a run", []))
    return " ".join([config, *overrides])


def readers_of_environments() -> dict[str, set[str]]:
    """The modules that read keys when environments are built, and when prompts are loaded for one."""
    trace.forget_reads()
    config = load_config("grpo_tiny.yaml")
    for name in ENVIRONMENTS:
        build_environment(name, config.env).close()
    return trace.readers()


def readers_of_data(folder: Path) -> dict[str, set[str]]:
    """The modules that read keys when rows of chats come from the files of a folder, one of them bad and one without environment."""
    rows: list[dict[str, object]] = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    rows += [{"messages": []}, {**rows[0], "env_name": "nowhere", "id": "elsewhere"}]
    (folder / "chats").mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (folder / "chats" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace.forget_reads()
    config = load_config(
        "grpo_tiny.yaml",
        [
            f"policy.model_name={folder / 'prepared/tiny/model'}",
            f"data.train.data_path={folder / 'chats'}",
            f"data.validation.data_path={folder / 'chats'}",
            "data.default.split=train",
            "data.validation.split=validation",
            "data.default.system_prompt=Add.",
            "data.on_bad_row=skip",
            "data.max_bad_row_share=0.5",
            "data.drop_rows_without_environment=true",
        ],
    )
    data = load_prompts(config)
    assert len(list(data.train)) == len(list(data.validation)) == 8
    return trace.readers()


def readers_in(console: str) -> dict[str, set[str]]:
    """The modules that read each key, as `--trace-config` of a run says."""
    _, _, report = console.partition("Config keys read by this run: ")
    lines = report.partition("\nConfig keys")[0].splitlines()[1:]
    return {key: set(modules.split(", ")) for key, _, modules in (line.strip().partition(": ") for line in lines)}


def python(folder: Path, *arguments: str) -> str:
    """The output of `python ARGUMENTS` in `folder`, which must end well."""
    environment = os.environ | {"WANDB_MODE": "offline"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
