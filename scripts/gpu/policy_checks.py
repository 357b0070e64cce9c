# SPDX-License-Identifier: Apache-2.0
"""Checks of the trainer: gradients and speed of Megatron-Core on a GPU, and the kernels of mamba_ssm."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from conversion.families.registry import family
from mrl.env import FULL_FLOAT32, ONE_CONFIGURATION
from mrl.gpus import device_variables
from scripts.bench.shapes import narrowed
from scripts.gpu.plan import Missed, Row, Setup, elapsed, environment, gpu_columns, seconds

if TYPE_CHECKING:
    from mrl.config.fields import Precision
    from mrl.phases import Phase
    from mrl.policy.policy import PolicyRank

# float32 on both sides, where a GPU sums in another order. Share of the norm.
MAX_GRADIENT_ERROR = 1e-4
# Against plain torch in float32. Products of TF32 would be off by 2.5e-4 to 4e-4 (their factors rounded so on a CPU).
MAX_KERNEL_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

# What libraries take for themselves in the first step.
MAX_GROWTH = 10**8

Scan = Callable[..., Tensor]
"""Called as MambaMixer calls mamba_ssm's."""

# The 30B model with few layers and few, small experts.
SMALL = dict(
    hybrid_override_pattern="ME*-",
    num_hidden_layers=4,
    hidden_size=128,
    intermediate_size=192,
    vocab_size=264,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    moe_shared_expert_intermediate_size=64,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
# Layers of the real size, with all experts: 2 of 23 MoE layers, whose 3.4 B parameters and optimizer state fit into 80
# GB.
LARGE = dict(hybrid_override_pattern="MEM*EM", num_hidden_layers=6)

# Dense bfloat16 operations a second, by part of the GPU's name (NVIDIA's data sheets).
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


def gradients(setup: Setup) -> list[Row]:
    """Loss and gradients of packed rows on the device, against a process that sees no GPU.

    Raises:
        Missed: a gradient is further off than rounding.
    """
    from tests.stack.policy import layout_ranks

    rows = random_rows([[9, 30, 17], [150, 2], [1, 70, 65]], vocab_size=264)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), {**narrowed(1), **SMALL})
        results = []
        for visible in (os.environ.get("CUDA_VISIBLE_DEVICES"), ""):
            with one_rank(visible) as ranks:
                config = layout_ranks.policy_config()
                results.append(ranks.run(layout_ranks.gradients, config, folder, rows, world_size=1, timeout_s=300)[0])
    (loss, found, _), (expected_loss, expected, _) = results
    assert found.keys() == expected.keys()
    errors = {
        name: float(np.linalg.norm(found[name] - grad) / max(np.linalg.norm(grad), 1e-30))
        for name, grad in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    row: Row = {
        "layers": layers(),
        "tensors": len(errors),
        "relative error of the loss": abs(loss - expected_loss) / abs(expected_loss),
        "worst relative error of a gradient": errors[worst],
        "of": worst,
        **gpu_columns(),
    }
    if not errors[worst] <= MAX_GRADIENT_ERROR:
        raise Missed(f"gradient of {worst} is off by {errors[worst]:.1e}", [row])
    return [row]


def layers() -> str:
    """Library of the model's layers here."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.ssm.mamba_mixer import HAVE_MAMBA_SSM

    return f"{'Transformer Engine' if HAVE_TE else 'local'}, {'mamba_ssm' if HAVE_MAMBA_SSM else 'plain torch'}"


@contextmanager
def one_rank(visible: str | None) -> Iterator:
    """A process that sees these GPUs, None: as this one does, and multiplies float32 as float32."""
    from tests.stack.ranks import RankPool

    sees = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if visible == "":
        sees |= device_variables(has_gpu=False)
    with environment({**sees, **FULL_FLOAT32, **ONE_CONFIGURATION}):
        ranks = RankPool(1)
        try:
            yield ranks
        finally:
            ranks.close()


def random_rows(lengths: list[list[int]], *, vocab_size: int) -> list[list[list[int]]]:
    """Token ids of sequences, by row."""
    draw = random.Random(0)
    return [[[draw.randrange(vocab_size) for _ in range(length)] for length in row] for row in lengths]


def write_model(folder: Path, hf_config: dict[str, object]) -> Path:
    """A Hugging Face folder of small random weights."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in family(hf_config).canonical(hf_config).items():
        values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        # Norms are near one, as in a trained model, and decays of the state within what trained models have.
        weights[name] = values * 0.1 + 1 if "norm" in name else values
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
    return folder


def mamba(setup: Setup) -> list[Row]:
    """The fused kernel that MambaMixer calls, forward and backward, on a packed row.

    Raises:
        Missed: an output or gradient is further off than rounding.
    """
    # mamba_ssm looks when it is imported, Triton when it compiles.
    with environment(FULL_FLOAT32 | ONE_CONFIGURATION):
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

        return compare_scans(setup, mamba_split_conv1d_scan_combined)


def compare_scans(setup: Setup, kernel: Scan) -> list[Row]:
    """`kernel` against ours in float32, by precision."""
    from mrl.policy import mamba_torch

    heads, head_dim, groups, state, num_tokens = 8, 64, 2, 128, 700
    channels = heads * head_dim + 2 * groups * state
    lengths = torch.tensor([1, 130, 3, num_tokens - 134])
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), lengths).int()[None].to(setup.device)
    rows: list[Row] = []
    for dtype, limit in MAX_KERNEL_ERROR.items():
        generator = torch.Generator().manual_seed(0)
        shapes = dict(
            zxbcdt=(1, num_tokens, heads * head_dim + channels + heads),
            weight=(channels, 4),
            bias=(channels,),
            dt_bias=(heads,),
        )
        values = {
            name: torch.randn(shape, generator=generator).to(dtype).to(setup.device) for name, shape in shapes.items()
        }
        values["dt_bias"] = values["dt_bias"].float()
        # The mixer keeps D in the precision of its parameters, and A is computed in float32.
        A, D = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator).to(dtype)
        upstream = torch.randn(1, num_tokens, heads * head_dim, generator=generator).to(setup.device)
        settings = dict(seq_idx=seq_idx, activation="silu", headdim=head_dim, ngroups=groups)
        theirs = _scan(kernel, values, (A.to(setup.device), D.to(setup.device)), upstream, settings)
        exact = {name: value.float() for name, value in values.items()}
        constants = (A.to(setup.device), D.float().to(setup.device))
        ours = _scan(mamba_torch.mamba_split_conv1d_scan_combined, exact, constants, upstream, settings)
        errors = {name: float((theirs[name].float() - ours[name]).norm() / ours[name].norm()) for name in ours}
        row: Row = {
            "dtype": str(dtype).removeprefix("torch."),
            **{f"error of {name}": error for name, error in errors.items()},
        }
        rows.append({**row, "at most": limit, **gpu_columns()})
        if not max(errors.values()) <= limit:
            raise Missed(f"relative errors in {dtype}: {errors}", rows)
    return rows


def _scan(
    scan: Scan,
    values: Mapping[str, Tensor],
    constants: tuple[Tensor, Tensor],
    upstream: Tensor,
    settings: Mapping[str, object],
) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    output = scan(*leaves.values(), *constants, 128, **settings)
    (output.float() * upstream).sum().backward()
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@contextmanager
def one_policy(
    hf_config: dict[str, object], *, precision: Precision, num_gpus: int, colocated: bool, share_prefixes: bool = False
) -> Iterator[PolicyRank]:
    """A one-rank policy with random weights; colocated: optimizer leaves the GPU between steps, as beside engines."""
    from mrl.config.schema.run import RunConfig
    from mrl.policy.parallel import Meeting
    from mrl.policy.policy import PolicyRank
    from tests.stack.policy import layout_ranks
    from tests.stack.ranks import _free_port

    config = RunConfig(policy=layout_ranks.policy_config(precision))
    config.cluster.gpus_per_node = num_gpus
    config.policy.megatron_cfg.optimizer.use_distributed_optimizer = True
    config.loss_fn.reference_policy_kl_penalty = 0.0
    config.policy.generation.colocated.enabled = colocated
    config.policy.share_prefixes = share_prefixes
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
        config.policy.model_name = name
        policy = PolicyRank(config, rank=0, world_size=1, meeting=Meeting("127.0.0.1", _free_port()), timeout_s=300.0)
    try:
        yield policy
    finally:
        policy.close()


def walk(setup: Setup) -> list[Row]:
    """A policy through the phases of two steps: seconds to enter and work in each, and the memory that it holds there.

    Raises:
        Missed: a phase holds more in the second step than in the first.
    """
    from tests.stack.policy import layout_ranks

    is_large = setup.device == "cuda"
    hf_config = {**narrowed(1), **SMALL}
    if is_large:
        hf_config |= {"hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    rows = [layout_ranks.packed_row(row) for row in random_rows([[1024 if is_large else 64]] * 2, vocab_size=264)]
    found, held = list[Row](), dict[tuple[int, str], int]()
    with one_policy(
        hf_config, precision="bfloat16" if is_large else "float32", num_gpus=int(is_large), colocated=True
    ) as policy:
        work: dict[Phase, Callable[[], object]] = {
            "refit": policy.settle,
            "generate": lambda: None,
            "logprob": lambda: (policy.set_batch(rows), policy.compute_old_logprobs()),
            "train": policy.train_step,
        }
        for step in (1, 2):
            for phase, do in work.items():
                entering = elapsed(setup.device, lambda phase=phase: policy.enter(phase))
                working = elapsed(setup.device, do)
                held[step, phase] = torch.cuda.memory_allocated() if is_large else 0
                row: Row = {"step": step, "phase": phase, "seconds to enter": entering, "seconds of work": working}
                found.append({**row, "GB held": held[step, phase] / 1e9, **gpu_columns()})
    if grown := [phase for phase in work if held[2, phase] > held[1, phase] + MAX_GROWTH]:
        raise Missed(f"phases {', '.join(grown)} hold more in the second step", found)
    return found


def train(setup: Setup) -> list[Row]:
    """Steps of a policy on one GPU: layers of the 30B model at their real size; on a CPU, small ones."""
    from tests.stack.policy import layout_ranks

    is_large = setup.device == "cuda"
    hf_config: dict[str, Any] = {**narrowed(1), **(LARGE if is_large else SMALL)}
    num_rows, length = 2, 8192 if is_large else 64
    rows = [
        layout_ranks.packed_row(row) for row in random_rows([[length]] * num_rows, vocab_size=hf_config["vocab_size"])
    ]
    with one_policy(
        hf_config, precision="bfloat16" if is_large else "float32", num_gpus=int(is_large), colocated=False
    ) as policy:

        def step() -> None:
            policy.enter("logprob")
            policy.set_batch(rows)
            policy.compute_old_logprobs()
            policy.enter("train")
            policy.train_step()

        taken = seconds(setup.device, step, repeats=3)
    num_tokens, active = num_rows * length, active_parameters(hf_config)
    # Two operations a parameter and token in each of: old logprobs, forward, and twice in backward.
    flops = 8 * active * num_tokens / taken
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in str(gpu_columns()["GPU"])), None)
    row: Row = {
        "active parameters": active,
        "tokens of a step": num_tokens,
        "seconds": taken,
        "tokens per s": num_tokens / taken,
    }
    return [{**row, "TFLOP/s": flops / 1e12, "MFU": flops / peak if peak else None, **gpu_columns()}]


def active_parameters(hf_config: dict[str, Any]) -> int:
    """Parameters a token meets in matrix products: of the experts only those it is sent to, and no input embedding."""
    share = hf_config["num_experts_per_tok"] / hf_config["n_routed_experts"]
    shapes = {name: shape for name, shape in family(hf_config).canonical(hf_config).items() if "embed" not in name}
    return round(sum(math.prod(shape) * (share if ".experts." in name else 1) for name, shape in shapes.items()))
