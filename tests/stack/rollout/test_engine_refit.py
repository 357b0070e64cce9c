# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from conversion.tensors import dtype_name
from mrl.refit import RefitError
from mrl.refit.checksum import digest
from tests.rollouts import StartEngine, differences, random_requests, run
from tests.stack.rollout.trainer import TIMEOUT_S, Trainer, expected_tensors, refit, vllm_layout

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

Checkpoint = Callable[[int], Path]

REQUESTS = random_requests(8)


@pytest.fixture(scope="module")
def trainer(checkpoint: Checkpoint) -> Trainer:
    return Trainer(checkpoint(0))


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, trainer: Trainer) -> Engine:
    engine = start_engine(0)
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    return engine


def model_of(engine: Engine) -> torch.nn.Module:
    return engine.llm.model_executor.driver_worker.get_model()


def live(engine: Engine, name: str) -> torch.nn.Parameter:
    return dict(model_of(engine).named_parameters())[name]


def test_loaded_tensors_are_those_of_the_table(engine: Engine, checkpoint: Checkpoint) -> None:
    from mrl.rollout.worker import engine_tensors

    tensors = engine_tensors(model_of(engine))
    layout = {slot: (slot_layout.shape, slot_layout.dtype) for slot, slot_layout in vllm_layout(checkpoint(0)).items()}
    assert {slot: (tuple(tensor.shape), dtype_name(tensor.dtype)) for slot, tensor in tensors.items()} == layout
    assert engine.live_digest() == [digest(expected_tensors(checkpoint(0)))]


def test_refit_zero_changes_no_byte(engine: Engine, trainer: Trainer) -> None:
    before = engine.live_digest()
    with pytest.raises(RuntimeError, match="no refit was finished"):
        engine.set_weight_version(1)
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before


def test_it_does_not_sample_during_a_refit(engine: Engine, trainer: Trainer) -> None:
    refit(engine, trainer, version=1)
    engine.refit(trainer.exchange(), True, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="is being refitted"):
        engine.step()
    refit(engine, trainer, version=2)
    engine.step()


def test_a_changed_byte_is_named_and_stops_sampling(
    engine: Engine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mixer.D"
    puller = engine.llm.model_executor.driver_worker.worker.sides["weights"].puller
    pull = puller.pull

    def pull_and_change(round_index: int) -> int:
        num_bytes = pull(round_index)
        with torch.no_grad():
            live(engine, name)[3] += 1
        return num_bytes

    monkeypatch.setattr(puller, "pull", pull_and_change)
    with pytest.raises(RefitError, match=name):
        engine.refit(trainer.exchange(), True, TIMEOUT_S)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no refit was finished"):
        engine.set_weight_version(3)
    with pytest.raises(RuntimeError, match="is being refitted"):
        engine.step()
    refit(engine, trainer, version=3)


def test_after_a_refit_it_equals_a_fresh_engine(
    engine: Engine, trainer: Trainer, start_engine: StartEngine, checkpoint: Checkpoint
) -> None:
    # A Mamba mixer reads its convolution through a second view, which must follow the parameter.
    refit(engine, trainer, version=5)
    old = run(engine, REQUESTS)
    trainer.load(checkpoint(1))
    refit(engine, trainer, version=6)
    new = run(engine, REQUESTS)
    assert {rollout.weight_version for rollout in old.values()} == {5}
    assert {rollout.weight_version for rollout in new.values()} == {6}
    digests = engine.live_digest()
    fresh = start_engine(1)
    fresh.set_weight_version(0)
    assert fresh.live_digest() == digests
    assert differences(run(fresh, REQUESTS), new) == []
    assert len(differences(old, new)) == len(REQUESTS)


def test_bfloat16_engines_get_rounded_weights(start_engine: StartEngine, checkpoint: Checkpoint) -> None:
    engine = start_engine(0, precision="bfloat16")
    before = engine.live_digest()
    live = engine.tensor_dtypes()
    # Some tensors of a Mamba and of an expert layer are float32 there.
    assert {dtype for _, dtype in live[0]} == {"float32", "bfloat16"}
    trainer = Trainer(checkpoint(0), precision="bfloat16", live=live)
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before
    trainer.load(checkpoint(1))
    refit(engine, trainer, version=2)
    assert engine.live_digest() == [digest(expected_tensors(checkpoint(1), precision="bfloat16", live=live[0]))]
    new = run(engine, REQUESTS)
    fresh = start_engine(1, precision="bfloat16")
    fresh.set_weight_version(0)
    assert differences(run(fresh, REQUESTS), new) == []
