# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from mrl.algo.ratios import kl_divergence
from mrl.config.schema.algo import LossConfig
from tests.unit.algo.loss_batches import Batch, fast_loss

KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize("kind", KINDS)
def test_kl_gradient_equals_finite_differences(kind: str):
    reference = torch.zeros(9, dtype=torch.float64)
    logprobs = torch.tensor(
        [-3.0, -1.5, -0.7, -0.01, 0.0, 0.01, 0.4, 1.5, 3.0], dtype=torch.float64, requires_grad=True
    )

    def kl(x: torch.Tensor) -> torch.Tensor:
        return kl_divergence(x, reference, kl_type=kind, input_clamp=2.0, output_clamp=1.7)  # type: ignore[arg-type]  # parametrized

    assert torch.autograd.gradcheck(kl, (logprobs,))
    kl(logprobs).sum().backward()
    outside = (logprobs.detach().abs() > 2.0) | (kl(logprobs).detach().abs() == 1.7)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad[outside], torch.zeros(int(outside.sum())).double())
    assert (logprobs.grad[~outside & (logprobs.detach() != 0)] != 0).all()


def test_kl_clamps_hold_the_value():
    far = torch.tensor([-100.0, 100.0])
    assert kl_divergence(far, torch.zeros(2), kl_type="k3", input_clamp=20.0, output_clamp=10.0).tolist() == [
        10.0,
        10.0,
    ]
    assert kl_divergence(far, torch.zeros(2), kl_type="k1", input_clamp=20.0).tolist() == [-20.0, 20.0]


@pytest.mark.parametrize("clamp", [dict(kl_input_clamp_value=1.0), dict(kl_output_clamp_value=0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_of_the_loss_passes_a_clamp(kind, clamp: dict[str, float]):
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    batch = Batch([1], zero - 4.0, zero - 4.0, zero - 4.0, zero - 1.0, zero, one, [0.0])
    config = LossConfig(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type=kind,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    assert fast_loss(batch, config)[1].any()
    assert not fast_loss(batch, replace(config, **clamp))[1].any()


POLICY, REFERENCE = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()


def test_k1_and_k3_are_unbiased_estimates():
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    for kind in ("k1", "k3"):
        assert torch.isclose((POLICY * kl_divergence(POLICY.log(), REFERENCE.log(), kl_type=kind)).sum(), exact)


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_gradient_of_the_loss_is_that_of_the_exact_kl(kind, is_off_policy: bool):
    """Over all tokens that could be drawn, by the policy itself or by a generator that differs from it."""
    logits = POLICY.log().requires_grad_()
    (exact,) = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum(), logits)
    generator = torch.tensor([0.4, 0.4, 0.2]).double() if is_off_policy else POLICY
    config = LossConfig(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type=kind,
        use_on_policy_kl_approximation=is_off_policy,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    zero = torch.zeros(3, dtype=torch.float64)
    batch = Batch([3], POLICY.log(), POLICY.log(), generator.log(), REFERENCE.log(), zero, zero + 1, [0.0])
    _, by_token, _ = fast_loss(batch, config)
    # The loss is a mean over the three tokens; each is drawn as often as the generator says.
    (estimate,) = torch.autograd.grad((3 * generator * by_token * logits.log_softmax(0)).sum(), logits)
    assert torch.allclose(estimate, exact)


def test_unknown_kl_type_is_refused():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_divergence(torch.zeros(1), torch.zeros(1), kl_type="k4")  # type: ignore[arg-type]  # what is refused
