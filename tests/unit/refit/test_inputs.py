# SPDX-License-Identifier: Apache-2.0
"""Every participant computes the driver's schedule from the inputs it is sent, or says that it cannot."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from conversion.families.common import MegatronCoords, MegatronParallel, VllmParallel
from conversion.families.registry import family
from mrl.refit import RefitError
from mrl.refit.inputs import RefitInputs
from tests.tiny import TINY_CONFIG as TINY
from tests.unit.conversion.hf_folders import tiny_config

PARALLEL = MegatronParallel(tp=2)


@pytest.fixture
def inputs() -> RefitInputs:
    """Two trainer ranks, and an engine of two workers on their GPUs, each GPU on a node of its own."""
    return RefitInputs(
        hf_config=TINY,
        ranks=tuple((PARALLEL, MegatronCoords(tp=tp, etp=0), "float32", "local") for tp in range(2)),
        parallel=VllmParallel(tp=2),
        precision="bfloat16",
        workers={0: (0, ()), 1: (1, ())},
        gpu_of={0: 0, 1: 1},
        node_of={0: 0, 1: 1},
        buffer_bytes=1 << 16,
    )


def test_a_participant_computes_the_schedule_of_the_driver(inputs: RefitInputs):
    driver = inputs.schedule()
    sent: RefitInputs = pickle.loads(pickle.dumps(inputs.signed(driver)))
    assert sent.schedule() == driver
    assert set(driver.workers) == {0, 1} and driver.link_bytes()["gpu"] > 0


def test_another_schedule_than_the_drivers_is_refused(inputs: RefitInputs):
    sent = replace(inputs.signed(inputs.schedule()), buffer_bytes=1 << 12)
    with pytest.raises(RefitError, match="another refit schedule than the driver"):
        sent.schedule()


def test_live_dtypes_come_before_those_of_the_table(inputs: RefitInputs):
    slot = next(copy.target for copy in inputs.schedule().class_of(0).copies())
    live = replace(inputs, workers={0: (0, ((slot.name, "float32"),)), 1: (1, ())})
    assert {copy.dtype for copy in live.schedule().class_of(0).copies() if copy.target == slot} == {"float32"}


def test_refit_zero_may_change_what_the_trainer_alone_rounds(inputs: RefitInputs):
    """Uses vLLM's dtypes of a bfloat16 nemotron_h: Mamba's A and router in float32, D in bfloat16 like the trainer."""
    hf_config = tiny_config("nemotron_h")
    stored = dict.fromkeys(family(hf_config).canonical(hf_config), "bfloat16")
    wide = {
        name: "float32"
        for name in stored
        if name.endswith(("A_log", "mixer.D", "gate.weight", "e_score_correction_bias"))
    }
    live = tuple(
        (f"model.layers.{index}.{name}", "float32")
        for index in range(8)
        for name in ("mixer.A", "mixer.gate.weight", "mixer.gate.e_score_correction_bias")
    )
    ranks = tuple((PARALLEL, MegatronCoords(tp=tp, etp=0), "bfloat16", "local") for tp in range(2))
    mamba = replace(inputs, hf_config=hf_config, ranks=ranks, workers={0: (0, live), 1: (1, live)})
    found = {slot.name.partition(".mixer.")[2] for slot in mamba.rounded(stored | wide)}
    assert found == {"A", "gate.weight"}, "what both round to bfloat16, and the bias, which nobody rounds, must stay"
    assert mamba.rounded(stored) == frozenset()
