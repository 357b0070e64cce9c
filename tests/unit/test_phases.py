# SPDX-License-Identifier: Apache-2.0
import pytest

from mrl.phases import PHASES, TRANSITIONS, WORKERS, ModelName, Phase, Residency, enter


def test_a_run_walks_through_its_phases():
    step: list[Phase] = [
        "teacher",
        "value",
        "logprob",
        "logprob",
        "train_value",
        "train",
        "refit",
        "generate",
        "checkpoint",
        "generate",
    ]
    walk: list[Phase] = ["load", "refit", "load", "refit", "generate", *step, *step]
    current: Phase | None = None
    for phase in walk:
        assert enter(current, phase) is PHASES[phase]
        current = phase


@pytest.mark.parametrize(
    ("current", "phase"),
    [(None, "train"), ("load", "generate"), ("train", "generate"), ("generate", "load"), ("logprob", "generate")],
)
def test_no_run_skips_a_refit(current: Phase | None, phase: Phase):
    with pytest.raises(ValueError, match=f"phase {phase} entered from"):
        enter(current, phase)


def test_the_kv_cache_and_the_optimizer_never_share_the_device():
    for residency in PHASES.values():
        assert not (
            residency.kv_cache == "device"
            and "device" in (residency.optimizer, residency.gradients, residency.activations)
        )


def test_weights_are_where_a_phase_needs_them():
    # Engine workers map the policy's all the time.
    assert all(residency.weights == "device" for residency in PHASES.values())
    assert (
        PHASES["refit"].engine_weights == PHASES["generate"].engine_weights == PHASES["generate"].kv_cache == "device"
    )


def test_a_model_beside_the_policy_is_on_the_device_only_while_it_computes():
    beside: tuple[ModelName, ...] = ("teacher", "critic")
    for model in beside:
        away = Residency(weights="host", gradients="none", optimizer="host")
        for phase, residency in PHASES.items():
            place = residency.of(model)
            if WORKERS.get(phase) == model:
                # Engines have yielded, and nothing of the policy is trained meanwhile.
                assert place.weights == place.activations == "device"
                assert (residency.gradients, residency.optimizer) == ("none", "host")
                assert (residency.engine_weights, residency.kv_cache) == ("none", "none")
            elif model == "critic" and phase == "checkpoint":
                # It is trained, so it is saved.
                assert (place.weights, place.gradients, place.optimizer) == ("device", away.gradients, away.optimizer)
            elif phase != "load":
                assert (place.weights, place.gradients, place.optimizer) == (
                    away.weights,
                    away.gradients,
                    away.optimizer,
                )
    assert PHASES["train_value"].of("critic").gradients == PHASES["train_value"].of("critic").optimizer == "device"
    assert all(residency.of("policy") is residency for residency in PHASES.values())


def test_every_phase_can_be_reached_and_left():
    assert TRANSITIONS.keys() == PHASES.keys()
    assert set().union(*TRANSITIONS.values()) == PHASES.keys()
