"""Every parallel layout gives one rank's loss, gradients and logprobs; one rank gives transformers'."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import layout_ranks
from tests.stack.ranks import RankPool

TP2 = dict(tensor_model_parallel_size=2)
TP2_SP = dict(**TP2, sequence_parallel=True)
PP2 = dict(pipeline_model_parallel_size=2)
EP2 = dict(expert_model_parallel_size=2)

LAYOUTS = {
    "tp2 sp ep1": (2, TP2_SP),
    "tp2 sp ep2": (2, TP2_SP | EP2),
    "tp2 sp etp2": (2, TP2_SP | dict(expert_tensor_parallel_size=2)),
    "pp2": (2, PP2),
    "pp2 uneven": (2, PP2 | dict(num_layers_in_first_pipeline_stage=3)),
    "dp2": (2, {}),
    "ep2 dp2": (2, EP2),
    "tp2 sp pp2 ep2": (4, TP2_SP | PP2 | EP2),
    "tp2 sp dp2 ep2": (4, TP2_SP | EP2),
    "tp2 sp ep1, recomputed": (2, TP2_SP | dict(activation_checkpointing=True)),
}


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all kinds of layers, in a number that two stages share evenly."""
    return models.save_nemotron_h(tmp_path_factory.mktemp("moe"), hybrid_override_pattern="MEM*EME-", num_hidden_layers=8)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_nemotron_h(tmp_path_factory.mktemp("dense"), hybrid_override_pattern="M*M-", num_hidden_layers=4)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_folder: Path) -> tuple[float, dict[str, np.ndarray]]:
    return gradients_of(ranks, moe_folder, 1, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_loss_and_gradients_of_one_rank(
    ranks: RankPool, moe_folder: Path, one_rank: tuple[float, dict[str, np.ndarray]], layout: str
):
    world_size, megatron = LAYOUTS[layout]
    loss, grads = gradients_of(ranks, moe_folder, world_size, megatron)
    assert loss == pytest.approx(one_rank[0], rel=1e-6)
    assert_close(grads, one_rank[1], 1e-5)


def test_tensor_parallelism_without_sequence_parallelism_gives_the_gradients_of_one_rank(ranks: RankPool, dense_folder: Path):
    # Megatron trains mixture-of-experts models only with both.
    loss, grads = gradients_of(ranks, dense_folder, 1, {})
    parallel_loss, parallel_grads = gradients_of(ranks, dense_folder, 2, TP2)
    assert parallel_loss == pytest.approx(loss, rel=1e-6)
    assert_close(parallel_grads, grads, 1e-5)


def test_one_rank_gives_the_gradients_of_transformers(moe_folder: Path, one_rank: tuple[float, dict[str, np.ndarray]]):
    model = transformers_model(moe_folder)
    loss = torch.zeros(())
    for row in ROWS:
        packed = layout_ranks.packed_row(row)
        loss = loss + (transformers_logprobs(model, row) * packed.advantages_T).sum() / len(ROWS)
    loss.backward()
    assert one_rank[0] == pytest.approx(loss.item(), rel=1e-5)
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        name = name.replace("model.", "backbone.", 1)
        if ".experts." in name and "shared" not in name:
            # transformers stacks the experts that are apart on disk.
            prefix, matrix = name.rsplit(".", 1)
            grads |= {f"{prefix}.{index}.{matrix}.weight": grad.numpy() for index, grad in enumerate(parameter.grad)}
        else:
            grads[name] = parameter.grad.numpy()
    assert_close(one_rank[1], grads, 2e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logprobs_equal_those_of_transformers(ranks: RankPool, tmp_path: Path, seed: int):
    folder = models.save_nemotron_h(tmp_path, seed, hybrid_override_pattern="MEM*EME-", num_hidden_layers=8)
    rows = [sequences(700, 1, 33, 260, 6), sequences(*range(20, 60)), sequences(*[16] * 20)]
    model = transformers_model(folder)
    with torch.no_grad():
        expected = np.concatenate([transformers_logprobs(model, row).numpy() for row in rows])
    is_token = np.concatenate([layout_ranks.packed_row(row).loss_mask_T.bool().numpy() for row in rows])
    assert is_token.sum() > 2000
    for world_size, megatron in ((1, {}), LAYOUTS["tp2 sp ep2"], LAYOUTS["tp2 sp pp2 ep2"]):
        results = ranks.run(layout_ranks.logprobs, layout_ranks.policy_config(**megatron), folder, rows, world_size=world_size)
        # The last rank is in the last stage.
        difference = np.abs(np.concatenate(results[-1]) - expected)[is_token]
        assert (difference <= 1e-5 + 1e-6 * np.abs(expected[is_token])).all(), (megatron, difference.max())


def sequences(*lengths: int) -> list[list[int]]:
    draw = random.Random(sum(lengths))
    return [[draw.randrange(264) for _ in range(length)] for length in lengths]


# Even numbers of tokens for sequence parallelism, an even number of rows for data parallelism. Rows differ in length; in the shortest most
# experts get no token.
ROWS = [sequences(9, 30, 17), sequences(150, 2), sequences(*[12] * 10), sequences(1, 70, 65), sequences(2), sequences(3, 1)]


def gradients_of(ranks: RankPool, folder: Path, world_size: int, megatron: dict) -> tuple[float, dict[str, np.ndarray]]:
    """Loss over all data-parallel ranks, and whole gradients put together from all ranks; copies on several ranks must agree."""
    results = ranks.run(layout_ranks.gradients, layout_ranks.policy_config(**megatron), folder, ROWS, world_size=world_size)
    grads: dict[str, np.ndarray] = {}
    for _, part in results:
        for name, grad in part.items():
            whole = grads.setdefault(name, grad)
            both = ~np.isnan(whole) & ~np.isnan(grad)
            assert np.array_equal(whole[both], grad[both]), f"copies of the gradient of {name} differ"
            grads[name] = np.where(np.isnan(whole), grad, whole)
    replicas = megatron.get("tensor_model_parallel_size", 1)
    return sum(loss for loss, _ in results) / replicas, grads


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    errors = {name: float(np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name])) for name in ours}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.1e}"


def transformers_model(folder: Path) -> torch.nn.Module:
    from transformers import NemotronHForCausalLM

    return models.unclamp_dt(NemotronHForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def transformers_logprobs(model: torch.nn.Module, row: list[list[int]]) -> torch.Tensor:
    """Log-probability of the next token at every position of a packed row; 0 at the end of each sequence."""
    parts = []
    for sequence in row:
        tokens = torch.tensor([sequence])
        logprobs = torch.log_softmax(model(tokens).logits[0], dim=-1)
        parts += [logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0], torch.zeros(1)]
    return torch.cat(parts)
