# SPDX-License-Identifier: Apache-2.0
"""Exported adapters, applied as PEFT's documentation says, give the merged weights; PEFT itself says which it does not
apply.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conversion.families.registry import FAMILIES, family
from tests.unit.conversion.hf_folders import tiny_config
from tests.unit.conversion.lora_cases import Patterns, export

EXCLUDED = {
    "nemotron_h": ("out_proj",),
    "deepseek_v3": ("*.mlp.linear_fc1", "*.mlp.linear_fc2", "*.shared_experts.*"),
    "glm4_moe": ("*.mlp.linear_fc1", "*.mlp.linear_fc2", "*.shared_experts.*"),
    "qwen3_5_moe_text": ("*.shared_experts.*", "*.experts.*"),
    "qwen3_next": ("*.shared_experts.*", "*.experts.*"),
    "qwen2_moe": ("*.mlp.linear_fc1", "*.mlp.linear_fc2", "*.shared_experts.*", "*.experts.*"),
}
"""Modules of which PEFT takes no adapters, or takes them for others."""


def random_weights(hf_config: dict[str, object]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in family(hf_config).canonical(hf_config).items()
    }


def applied(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Weights with a PEFT adapter: W + alpha / r B A of a linear layer; for [experts, out, in], per expert.

    There A is [experts * r, in], expert by expert, and B [out, r * experts], rank by rank; the wrapper of a module's
    first parameter is the base layer of that of its second.
    """
    config, factors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    merged, scale = dict(weights), config["lora_alpha"] / config["r"]
    # transformers 5 has nemotron_h's `backbone` as `model`: PEFT would adapt nothing that is named by it.
    assert not any(target.startswith(("backbone.", "model.")) for target in config["target_modules"])
    by_parameter: dict[str, list[str]] = {}
    for parameter in sorted(
        config.get("target_parameters", []), key=lambda name: ["up_proj", "down_proj"].index(name.rpartition(".")[2])
    ):
        by_parameter.setdefault(parameter.rpartition(".")[0], []).append(parameter.rpartition(".")[2])
    for name in factors:
        module = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)
        if module is None:
            continue
        a, b = (factors[f"base_model.model.{module[1]}.lora_{letter}.weight"] for letter in "AB")
        if not module[1].removesuffix(".base_layer").endswith(".experts"):
            assert any(module[1] == target or module[1].endswith(f".{target}") for target in config["target_modules"])
            merged[f"{module[1]}.weight"] = merged[f"{module[1]}.weight"] + scale * b @ a
            continue
        experts = module[1].removesuffix(".base_layer")
        wrapped = next(names for path, names in by_parameter.items() if experts.endswith(path))
        parameter = wrapped[0] if module[1] != experts or len(wrapped) == 1 else wrapped[1]
        num_experts = len(a) // config["r"]
        stacked_a, stacked_b = a.reshape(num_experts, -1, a.shape[1]), b.reshape(len(b), -1, num_experts)
        change = scale * torch.einsum("ore,eri->eoi", stacked_b, stacked_a)
        for index in range(num_experts):
            merged[f"{experts}.{index}.{parameter}.weight"] = (
                merged[f"{experts}.{index}.{parameter}.weight"] + change[index]
            )
    return merged


CASES: list[tuple[str, Patterns]] = [
    # Config rules refuse adapters of gpt_oss.
    *((name, ()) for name in FAMILIES if name != "gpt_oss"),
    ("nemotron_h", ("linear_fc1",)),
    ("nemotron_h", ("linear_fc2",)),
    ("nemotron_h", ("decoder.layers.1.mlp.experts.linear_fc1", "decoder.layers.4.*", "linear_qkv")),
    ("mixtral", ("linear_fc2", "linear_qkv")),
    ("qwen3_moe", ("decoder.layers.1.mlp.experts.*",)),
]


@pytest.mark.parametrize(("model_type", "targets"), CASES)
def test_the_adapters_are_what_is_merged(model_type: str, targets: Patterns, tmp_path: Path):
    hf_config = tiny_config(model_type)
    weights = random_weights(hf_config)
    merged = export(
        hf_config, weights, tmp_path / "peft", targets=targets, excludes=() if targets else EXCLUDED.get(model_type, ())
    )
    by_peft = applied(weights, tmp_path / "peft")
    assert any(not torch.equal(merged[name], weights[name]) for name in weights)
    for name, expected in merged.items():
        torch.testing.assert_close(by_peft[name], expected, atol=1e-5, rtol=1e-5, msg=name)


OTHERS = r"PEFT 0.21.* passes over them, or takes them for others, in layers"


@pytest.mark.parametrize(
    ("model_type", "targets", "excludes", "overrides", "reason"),
    [
        (
            "nemotron_h",
            (),
            (),
            {},
            r"PEFT 0.21.* does not load them: .*'out_proj' is incompatible with Mamba-based models",
        ),
        ("qwen3_moe", ("linear_fc1",), (), {}, rf"{OTHERS}.0: experts, layers.1: experts"),
        ("mixtral", ("linear_fc1", "linear_qkv"), (), {}, rf"{OTHERS}.0: experts, layers.1: experts"),
        ("glm4_moe", (), (), {}, rf"{OTHERS}.0: down_proj"),
        ("qwen2_moe", (), (), {}, rf"{OTHERS}.0: experts"),
        # The shared experts have the names of the routed ones.
        ("qwen2_moe", (), ("*.shared_experts.*",), {}, rf"{OTHERS}.0: experts"),
        ("qwen2_moe", ("linear_fc2",), ("*.shared_experts.*",), {}, rf"{OTHERS}.0: experts"),
        ("qwen3_moe", (), (), {"mlp_only_layers": [1]}, rf"{OTHERS}.1: down_proj"),
    ],
)
def test_what_peft_does_not_apply_is_refused(
    model_type: str, targets: Patterns, excludes: Patterns, overrides: dict[str, object], reason: str, tmp_path: Path
):
    hf_config = tiny_config(model_type, **overrides)
    with pytest.raises(
        ValueError, match=f"cannot be used with PEFT: {reason}.* mcore-to-hf writes the model with them merged"
    ):
        export(hf_config, random_weights(hf_config), tmp_path / "peft", targets=targets, excludes=excludes)
    assert not (tmp_path / "peft").exists()


def test_without_peft_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "conversion.peft_check", raising=False)
    monkeypatch.setitem(sys.modules, "peft", None)
    hf_config = tiny_config("llama")
    with pytest.raises(
        ValueError, match=r"only PEFT itself says whether it applies adapters; pip install 'mrl\[adapters\]'"
    ):
        export(hf_config, random_weights(hf_config), tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
