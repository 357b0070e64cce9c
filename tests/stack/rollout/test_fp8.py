# SPDX-License-Identifier: Apache-2.0
"""Engines with weights in FP8: refits against vLLM's own loader, and its casts against one in numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from conversion.files.hf_folder import read_config
from mrl.algo.agreement import MAX_MEAN_ERROR
from mrl.config.fp8 import FORMS, kept_layers, quantised_bytes
from mrl.config.model import sizes_of
from mrl.config.schema.generation import GenerationConfig
from mrl.refit import RefitError
from mrl.refit.staging import Quantiser
from tests import models
from tests.parity import hf_scores
from tests.rollouts import StartEngine, differences, random_requests, run
from tests.stack.rollout.trainer import TIMEOUT_S, Trainer, refit

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

BLOCK = 128
# Of positive FP8 numbers (e4m3, no infinities): by exponent and three binary digits.
E4M3 = np.array(
    [(m / 8) * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:-1]
REQUESTS = random_requests(8)
MODELS = [
    ("fp8_per_block", "qwen2"),
    ("fp8_per_channel", "nemotron_h"),
    ("fp8_per_channel", "qwen3_next"),
    ("fp8_per_tensor", "deepseek_v3"),
    ("mxfp8", "qwen3_moe"),
]


def nearest(x: np.ndarray) -> np.ndarray:
    """The FP8 numbers next to these, those with an even last digit where two are."""
    size = np.minimum(np.abs(x), E4M3[-1])
    above = np.searchsorted(E4M3, size).clip(1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    is_low = (size - low < high - size) | ((size - low == high - size) & ((above - 1) % 2 == 0))
    return np.copysign(np.where(is_low, low, high), x).astype(np.float32)


def expected(weight: Tensor, form: str) -> tuple[np.ndarray, np.ndarray]:
    """FP8 numbers and scales of a bfloat16 matrix, in float32 as vLLM computes them."""
    x, largest = weight.float().numpy(), np.float32(E4M3[-1])
    if form == "fp8_per_block":
        rows, columns = x.shape
        numbers, scales = np.empty_like(x), np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
        for i, j in np.ndindex(scales.shape):
            part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = np.maximum(np.abs(x[part]).max(), np.float32(1e-4)) / largest
            numbers[part] = nearest(x[part] * (np.float32(1) / scales[i, j]))
        return numbers, scales
    if form == "mxfp8":
        groups = x.astype(np.float64).reshape(len(x), -1, 32)
        # The smallest power of two by which the largest number of a group is no more than 448.
        mantissas, exponents = np.frexp(np.maximum(np.abs(groups).max(-1), 2.0**-126))
        powers = np.clip(exponents - 9 + (mantissas > largest / 512), -127, 127)
        return nearest(groups / 2.0 ** powers[..., None]).reshape(x.shape), (powers + 127).astype(np.uint8)
    if form == "fp8_per_channel":
        scales = np.maximum(np.abs(x).max(1, keepdims=True) / largest, np.float32(1) / (largest * np.float32(512)))
        return nearest(x / scales), scales
    scales = (np.abs(x).max() / largest).reshape(1)
    return nearest(x * (np.float32(1) / scales)), scales


def quantisers_of(engine: Engine) -> list[Quantiser]:
    from mrl.rollout.worker import quantisers

    return quantisers([engine.llm.model_executor.driver_worker.get_model()])


def extreme(shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(shape, generator=generator)
    zeros, one = torch.zeros(shape), torch.zeros(shape)
    one[-1, -1] = torch.finfo(torch.bfloat16).max
    tiny = normal * torch.finfo(torch.bfloat16).tiny * 2**-5
    spread = normal * 2.0 ** torch.randint(-60, 60, shape, generator=generator)
    return [tensor.to(torch.bfloat16) for tensor in (normal, zeros, one, tiny, spread, -normal.abs())]


@pytest.mark.parametrize(("form", "model_type"), MODELS)
def test_refits_leave_what_vllm_loads(start_engine: StartEngine, tmp_path: Path, form: str, model_type: str) -> None:
    loaded, other = (models.save_model(tmp_path / str(seed), model_type, seed) for seed in range(2))
    engine = start_engine(loaded, precision="fp8", quantization=form)
    _check_casts(engine, form)
    _check_sizes(engine, loaded, form)
    before = engine.live_digest()
    trainer = Trainer(loaded, precision="bfloat16", live=engine.tensor_dtypes())
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before
    _check_faults(engine, trainer)
    trainer.load(other)
    refit(engine, trainer, version=3)
    refitted, rollouts = engine.live_digest(), run(engine, REQUESTS)
    fresh = start_engine(other, precision="fp8", quantization=form)
    fresh.set_weight_version(0)
    assert fresh.live_digest() == refitted
    assert differences(run(fresh, REQUESTS), rollouts) == []


@pytest.mark.parametrize(
    "form, parallel",
    [
        pytest.param("fp8_per_channel", VllmParallel(tp=2), marks=pytest.mark.long("fp8")),
        ("fp8_per_block", VllmParallel(tp=2, ep=2)),
        pytest.param("mxfp8", VllmParallel(pp=2), marks=pytest.mark.long("fp8")),
    ],
)
def test_refits_of_all_workers_leave_what_vllm_loads(
    start_engine: StartEngine, tmp_path: Path, form: str, parallel: VllmParallel
) -> None:
    """Parts of experts, of whole blocks: workers that share a matrix agree on its scales, and a block holds parts of
    query, key and value.
    """
    loaded, other = (
        models.save_model(tmp_path / str(seed), "qwen3_moe", seed, hidden_size=128, moe_intermediate_size=256)
        for seed in range(2)
    )
    engine = start_engine(
        loaded,
        precision="fp8",
        quantization=form,
        tensor_parallel_size=parallel.tp,
        expert_parallel_size=parallel.ep,
        pipeline_parallel_size=parallel.pp,
    )
    before = engine.live_digest()
    trainer = Trainer(loaded, parallel, precision="bfloat16", live=engine.tensor_dtypes())
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before
    trainer.load(other)
    refit(engine, trainer, version=2)
    assert engine.live_digest() != before
    trainer.load(loaded)
    refit(engine, trainer, version=3)
    assert engine.live_digest() == before


def test_rounding_measures_a_quarter_of_the_limit(start_engine: StartEngine, tmp_path: Path) -> None:
    """Mean difference of logprobs from transformers in float32; `MAX_MEAN_ERROR` says what was measured."""
    folder, model = models.save_model(tmp_path, "qwen3", 0), models.tiny_model("qwen3", 0)
    for form in FORMS:
        engine = start_engine(folder, precision="fp8", quantization=form)
        engine.set_weight_version(0)
        rollouts = run(engine, random_requests(32, max_new_tokens=32)).values()
        errors = [
            np.abs(hf_scores(model, rollout.request.token_ids, rollout.token_ids.tolist()).logprobs - generated)
            for rollout in rollouts
            for generated in [rollout.generator_logprobs]
        ]
        assert MAX_MEAN_ERROR["fp8"] / 10 < np.concatenate(errors).mean() < MAX_MEAN_ERROR["fp8"] / 4


def _check_casts(engine: Engine, form: str) -> None:
    """The engine's own cast gives the numbers of the one above, bit for bit, for all kinds of numbers."""
    quantiser = next(found for found in quantisers_of(engine) if "o_proj" in next(iter(found.loaded)).name)
    ((slot, like),) = quantiser.loaded.items()
    for weight in extreme(like.shape):
        made = quantiser.make({slot: weight})
        scales = next(tensor for name, tensor in made.items() if name != slot)
        numbers = made[slot] if form in ("fp8_per_block", "mxfp8") else made[slot].t()
        wanted, wanted_scales = expected(weight, form)
        assert np.array_equal(scales.numpy(), wanted_scales)
        with np.errstate(divide="ignore", over="ignore"):
            is_invertible = form == "mxfp8" or np.isfinite(np.float32(1) / wanted_scales).all()
        if is_invertible:
            assert np.array_equal(numbers.float().numpy(), wanted)
        else:
            # vLLM multiplies by the reciprocal of a scale of 0, or of one so small that it has none.
            assert form == "fp8_per_tensor"


def _check_sizes(engine: Engine, folder: Path, form: str) -> None:
    """The plan's rule names the tensors that vLLM quantises, and their bytes."""
    from mrl.rollout.worker import engine_tensors

    live = engine_tensors(engine.llm.model_executor.driver_worker.get_model())
    sizes, found = sizes_of(read_config(folder / "config.json")), quantisers_of(engine)
    kept = kept_layers(GenerationConfig(), sizes)
    loaded = {slot.name: tuple(tensor.shape) for quantiser in found for slot, tensor in quantiser.loaded.items()}
    rest = {slot.name: tuple(tensor.shape) for slot, tensor in live.items() if "scale" not in slot.name}
    planned = {
        name: num_bytes
        for name, shape in (rest | loaded).items()
        if (num_bytes := quantised_bytes(name, shape, form, kept)) is not None
    }
    assert planned.keys() == loaded.keys()
    assert sum(planned.values()) == sum(live[slot].nbytes for quantiser in found for slot in quantiser.made)
    assert all(math.prod(shape) for shape in loaded.values())


def _check_faults(engine: Engine, trainer: Trainer) -> None:
    """A byte that changes in the engine, or on its way there, is named and stops sampling; the next refit mends it."""
    puller = engine.llm.model_executor.driver_worker.worker.sides["weights"].puller
    assert puller is not None
    (batch, *_) = puller._rounds[0][1:]
    slot = next(iter(batch.quantiser.loaded))
    for fault, said in ((_change_made, "is not what the engine makes"), (_change_staged, "differs from source rank")):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, puller, batch.quantiser, slot)
            with pytest.raises(RefitError, match=f"{slot.name}.*{said}"):
                engine.refit(trainer.exchange(), True, TIMEOUT_S)
        with pytest.raises(RuntimeError, match="no refit was finished"):
            engine.set_weight_version(2)
        refit(engine, trainer, version=2)


def _change_made(patch: pytest.MonkeyPatch, puller: object, quantiser: Quantiser, slot: Slot) -> None:
    make, calls = quantiser.make, [0]

    def changed(weights: dict[Slot, Tensor]) -> dict[Slot, Tensor]:
        made = dict(make(weights))
        calls[0] += 1
        if calls[0] == 1:
            made[slot].view(torch.uint8)[(0,) * made[slot].ndim] ^= 1
        return made

    patch.setitem(vars(quantiser), "make", changed)


def _change_staged(patch: pytest.MonkeyPatch, puller: object, quantiser: Quantiser, slot: Slot) -> None:
    different = getattr(puller, "_different")  # noqa: B009  of another module

    def changed(batch: object) -> list[str]:
        if getattr(batch, "quantiser", None) is quantiser:
            staged: dict[Slot, Tensor] = getattr(puller, "_staged")  # noqa: B009
            staged[slot].view(torch.int16).flatten()[0] ^= 1
        return different(batch)

    patch.setattr(puller, "_different", changed)
