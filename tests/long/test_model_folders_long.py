# SPDX-License-Identifier: Apache-2.0
"""Part "model_folders": folders through check, convert, two train steps, export, transformers, vLLM; PEFT adapters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf
from conversion.files.hf_folder import read_config, stored_tensors
from mrl import check
from mrl.rollout.environment import engine_environment
from tests import models
from tests.long.published import FOLDERS, publish
from tests.sources import ROOT
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.unit.conversion.lora_cases import export

pytestmark = [pytest.mark.long("model_folders"), pytest.mark.timeout(1800)]

ONE_RANK = [
    "cluster.cpu_units_per_node=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.expert_model_parallel_size=1",
    "policy.generation.vllm_cfg.tensor_parallel_size=1",
    "policy.generation.num_cpu_engines=1",
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "checkpointing.save_period=2",
]
BFLOAT16 = ["policy.precision=bfloat16", "policy.megatron_cfg.optimizer.bf16=true"]
STARTED_WRONG = "sampling of its own"
"""The folder whose run is started once with an engine that computes something else, and goes on without it."""
IN_BFLOAT16 = ("wide Mamba", "mixed dtypes")
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
BIASED = "tests.long.biased:Biased"
TIMEOUT_S = 900


def logits(folder: Path) -> Tensor:
    model = models.unclamp_dt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    with torch.no_grad():
        return model(torch.arange(60)[None]).logits


def python(*arguments: str, code: int = 0, **environment: str) -> str:
    command = [sys.executable, *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == code, ended.stdout[-6000:] + ended.stderr[-3000:]
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_folder_is_trained_and_exported(name: str, tmp_path: Path):
    folder = publish(name, tmp_path)
    precision = "bfloat16" if name in IN_BFLOAT16 else "float32"
    inputs = [item for item in write_inputs(tmp_path) if not item.startswith("policy.model_name")]
    overrides = [
        f"policy.model_name={folder}",
        *inputs,
        *SMALL,
        *ONE_RANK,
        *(BFLOAT16 if precision == "bfloat16" else []),
    ]

    checked = check.examine(ROOT / "configs/grpo_tiny.yaml", overrides)
    assert checked.refused == [] == checked.unchecked

    convert_hf_to_mcore(folder, tmp_path / "mcore")
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(folder)), (
        "transformers reads the source and what came of it alike"
    )

    command = ("-m", "mrl.train", str(ROOT / "configs/grpo_tiny.yaml"), *overrides)
    if name == STARTED_WRONG:
        said = python(*command, f"policy.generation.vllm_kwargs.logits_processors=[{BIASED}]", code=2)
        assert "trainer and engine compute different models of the same weights" in said and "vllm_kwargs" in said
        assert "Step 1 of 2" not in said and not [*(tmp_path / "run").glob("step_*")]
    said = python(*command)
    assert "Step 2 of 2 is done" in said and "Trainer and engine compute the same model" in said
    rounded = re.search(r"Refit zero: tensors that the files have in a wider dtype, .* \((\d+)\)", said)
    assert (rounded is not None) == (name == "wide Mamba"), "its A and its router are wider in vLLM than in the trainer"

    exported = tmp_path / "exported"
    python("-m", "mrl.convert", "mcore-to-hf", "--mcore", str(tmp_path / "run/step_2"), "--out", str(exported))
    before, after = read_config(folder / "config.json"), read_config(exported / "config.json")
    kept = {"auto_map", "rope_scaling", "rope_theta", "rope_parameters", "model_type", "architectures"}
    assert {key: before.get(key) for key in kept} == {key: after.get(key) for key in kept}
    assert {after[key] for key in ("dtype", "torch_dtype") if key in after} == {precision}
    companions = [
        path.relative_to(folder)
        for pattern in ("*.jinja", "*/*.jinja", "*.py", "generation_config.json")
        for path in folder.glob(pattern)
    ]
    assert all((exported / path).read_bytes() == (folder / path).read_bytes() for path in companions)
    assert stored_tensors(exported).keys() <= stored_tensors(folder).keys()

    said = python(
        "-m", "tests.long.export_child", str(exported), precision, code=0, **engine_environment(has_gpu=False)
    )
    found = re.search(r"difference (\S+) (\S+)", said)
    assert found is not None and float(found[2]) < MAX_DIFFERENCE[precision], (
        "vLLM computes what transformers does of the export"
    )


WITH_PEFT = """
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests import models

for base, adapter, merged in zip(*[iter(sys.argv[1:])] * 3):
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    logits = []
    with torch.no_grad():
        others = [AutoModelForCausalLM.from_pretrained(folder) for folder in (merged, base)]
        for model in (adapted, *others):
            logits.append(models.unclamp_dt(model).float().eval()(torch.arange(40)[None]).logits)
    differences = [float((one - logits[1]).abs().max()) for one in (logits[0], logits[2])]
    print("difference", *differences, flush=True)
"""


def test_peft_loads_what_is_exported_for_it(tmp_path: Path):
    cases = [
        *((model_type, (), ()) for model_type in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")),
        ("nemotron_h", (), ("out_proj",)),
        ("nemotron_h", ("linear_fc1",), ()),
        ("nemotron_h", ("linear_fc2",), ()),
        ("nemotron_h", ("decoder.layers.1.mlp.experts.linear_fc1", "decoder.layers.4.*", "linear_qkv"), ()),
        ("mixtral", ("linear_fc2", "linear_qkv"), ()),
    ]
    arguments = []
    for index, (model_type, targets, excludes) in enumerate(cases):
        root = tmp_path / str(index)
        base = models.save_model(root / "base", model_type)
        models.save_model(root / "merged", model_type)
        weights = load_file(base / "model.safetensors")
        merged = export(
            read_config(base / "config.json"), weights, root / "adapter", targets=targets, excludes=excludes
        )
        save_file(merged, root / "merged/model.safetensors", {"format": "pt"})
        arguments += [str(root / part) for part in ("base", "adapter", "merged")]
    said = python("-c", WITH_PEFT, *arguments, PYTHONPATH=str(ROOT))
    found = re.findall(r"difference (\S+) (\S+)", said)
    assert len(found) == len(cases)
    for case, (to_merged, to_base) in zip(cases, found, strict=True):
        assert float(to_merged) < 1e-4 and float(to_base) > 0.1, case
