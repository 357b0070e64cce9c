import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.sft import nll_loss, perplexity


def test_a_row_by_hand():
    logprobs = torch.tensor([-1.0, -2.0, float("nan"), -4.0], requires_grad=True)
    loss, metrics = nll_loss(logprobs, torch.tensor([0.25, 0.25, 0.0, 0.25]))
    assert loss.item() == metrics["loss"].item() == 1.75
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.25, 0.0, -0.25]


def test_perplexity():
    assert math.isclose(perplexity(math.log(7.0)), 7.0, rel_tol=1e-12)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-20.0, 0.0), st.booleans()), min_size=1, max_size=20), st.integers(0, 20))
def test_parts_of_a_batch_add_up_to_the_mean_over_its_tokens(tokens: list[tuple[float, bool]], cut: int):
    learned = [logprob for logprob, is_learned in tokens if is_learned]
    logprobs = torch.tensor([logprob for logprob, _ in tokens], dtype=torch.float64)
    weights = torch.tensor([float(is_learned) for _, is_learned in tokens], dtype=torch.float64) / max(len(learned), 1)
    parts = [nll_loss(logprobs[part], weights[part])[0].item() for part in (slice(0, cut), slice(cut, None))]
    assert math.isclose(sum(parts), -sum(learned) / max(len(learned), 1), abs_tol=1e-9)
