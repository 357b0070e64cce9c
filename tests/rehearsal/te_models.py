# SPDX-License-Identifier: Apache-2.0
"""Every family's Megatron model with Transformer Engine's layers, on the meta device, against the conversion tables.

Runs in the process of gpu_rows.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from tests import models
from tests.rehearsal.gpu_host import Rank, as_rank
from tests.sources import ROOT

PUBLISHED = {"grpo_nanov3.yaml": "nemotron3_nano_30b_a3b", "grpo_qwen3_30ba3b.yaml": "qwen3_30b_a3b"}
"""A model of scripts/bench/models for each packaged config: at its full size, in its own layout."""
IN_FP8, FP8 = ("grpo_qwen3_30ba3b.yaml", "qwen3_30b_a3b"), ("policy.megatron_cfg.fp8_cfg.enabled=true",)
TINY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, queries of full rank": ("deepseek_v3", dict(q_lora_rank=None)),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {}),
    "nemotron_h": ("nemotron_h", dict(hybrid_override_pattern="MEM*-EME", num_hidden_layers=8)),
    "nemotron_h, latent experts": (
        "nemotron_h",
        dict(hybrid_override_pattern="MEM*-EME", num_hidden_layers=8, moe_latent_size=32),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3": ("qwen3", dict(tie_word_embeddings=False)),
    "qwen3, tied": ("qwen3", dict(tie_word_embeddings=True)),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", dict(mlp_only_layers=[1])),
}
BF16 = (
    "policy.precision=bfloat16",
    "policy.megatron_cfg.optimizer.bf16=true",
    "policy.megatron_cfg.optimizer.params_dtype=bfloat16",
)
WITH_EXPERTS = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)


@dataclass(frozen=True)
class Row:
    """One rank of one model in one layout."""

    case: str
    layout: str
    rank: int
    num_weights: int
    fault: str
    """Difference of the live model from the conversion table; empty where it does not."""


def layouts(model_type: str) -> list[str]:
    """Names of layouts that a family has."""
    if model_type == "nemotron_h":
        return ["one", "tp2 sp pp2 ep2", "tp2 sp ep2 etp2"]
    if model_type == "gpt_oss":  # Megatron does not cut biased experts
        return ["one", "pp2 vpp2", "tp2 sp pp2 ep2"]
    return [
        "one",
        "pp2 vpp2",
        *(("tp2 sp pp2 ep2", "tp2 sp ep2 etp2") if model_type in WITH_EXPERTS else ("tp2 sp pp2",)),
    ]


def fault_of(
    config: RunConfig, hf_config: dict[str, object], case: str, layout: str, rank: int, world_size: int
) -> Row:
    """Builds the rank, up to its optimizer."""
    with as_rank(config.policy, rank, world_size):
        try:
            built = Rank(config.policy, hf_config, "meta")
        except (KeyError, RuntimeError) as error:
            return Row(case, layout, rank, 0, f"{type(error).__name__}: {error}")
        return Row(case, layout, rank, len(built.tensors), "")


def rows(folder: Path) -> Iterator[Row]:
    """Published models on the first and last rank of each pipeline stage, tiny ones on every rank of their layouts."""
    # Its package imports Megatron.
    from tests.stack.policy.policy_ranks import run_config
    from tests.stack.policy.sizes import sizes

    for (config_file, name), words in [*((item, ()) for item in PUBLISHED.items()), (IN_FP8, FP8)]:
        hf_config = json.loads((ROOT / f"scripts/bench/models/{name}.config.json").read_text())
        model_folder = _folder(folder / f"{name}{len(words)}", hf_config)
        config = load_config(config_file, [f"policy.model_name={model_folder}", *words])
        world, stages = config.num_policy_ranks, config.policy.megatron_cfg.pipeline_model_parallel_size
        for rank in (
            edge for stage in range(stages) for edge in (stage * world // stages, (stage + 1) * world // stages - 1)
        ):
            yield fault_of(config, hf_config, name, f"{config_file}{' in FP8' * bool(words)}", rank, world)
    for index, (case, (model_type, changed)) in enumerate(TINY.items()):
        hf_config = AutoConfig.for_model(model_type, **{**models.TINY[model_type], **changed}).to_dict()
        model_folder = _folder(folder / str(index), hf_config)
        for layout in layouts(model_type):
            config = run_config(model_folder, layout, *BF16)
            num_ranks, _ = sizes(layout)
            for rank in range(num_ranks):
                yield fault_of(config, hf_config, case, layout, rank, num_ranks)


def _folder(folder: Path, hf_config: Mapping[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder
