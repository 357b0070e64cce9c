# SPDX-License-Identifier: Apache-2.0
"""Router replay: routes that no router would choose are followed as in transformers, in every layout and pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models, routes
from tests.stack.policy import layout_ranks, policy_ranks, replay_ranks
from tests.stack.policy.layouts import ROWS, Gradients, assert_close, gradients_of, transformers_model
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

REPLAY: dict[str, object] = dict(router_replay=True)
# Microbatches are in flight while others go backward, and what these compute again must follow their own routes.
LAYOUTS = ("one, recomputed", "pp2, recomputed", "cp2 ep2, recomputed", "tp2 sp pp2 ep2, recomputed")


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_nemotron_h(
        tmp_path_factory.mktemp("moe"), hybrid_override_pattern="MEM*EME-", num_hidden_layers=8
    )


@pytest.fixture(scope="module")
def replayed(ranks: RankPool, moe_folder: Path) -> Gradients:
    """Gradients of one rank."""
    return gradients_of(ranks, moe_folder, 1, REPLAY)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_follows_routes_as_one_rank_does(ranks: RankPool, moe_folder: Path, replayed: Gradients, layout: str):
    world_size, megatron = sizes(layout)
    loss, grads = gradients_of(ranks, moe_folder, world_size, megatron | REPLAY)
    assert loss == pytest.approx(replayed[0], rel=1e-6)
    assert_close(grads, replayed[1], 1e-5)


def test_one_rank_follows_routes_as_transformers_does(ranks: RankPool, moe_folder: Path, replayed: Gradients):
    model = transformers_model(moe_folder)
    hf_config = json.loads((moe_folder / "config.json").read_text())
    losses = []
    for row in ROWS:
        advantages_T = layout_ranks.packed_row(row).advantages_T
        logprobs = []
        for sequence in row:
            with routes.followed(model, routes.forced_routes(sequence, hf_config)):
                tokens = torch.tensor([sequence])
                all_logprobs = torch.log_softmax(model(tokens).logits[0], dim=-1)
                logprobs += [all_logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0], torch.zeros(1)]
        losses.append((torch.cat(logprobs) * advantages_T).sum() / len(ROWS))
    loss = torch.stack(losses).sum()
    loss.backward()
    assert replayed[0] == pytest.approx(loss.item(), rel=1e-5)
    # The gate learns through the scores of experts that it did not choose.
    gates = {name: parameter.grad for name, parameter in model.named_parameters() if name.endswith(".gate.weight")}
    assert len(gates) == 3
    for name, grad in gates.items():
        assert grad is not None
        ours = replayed[1][name.replace("model.", "backbone.")]
        assert np.linalg.norm(ours - grad.numpy()) <= 2e-5 * np.linalg.norm(grad.numpy())


def test_a_step_counts_what_routers_would_have_chosen_otherwise(ranks: RankPool, moe_folder: Path):
    """Half the rollouts have transformers' choices, the others random ones: 1 in 28 of these is the router's own."""
    hf_config = json.loads((moe_folder / "config.json").read_text())
    model = transformers_model(moe_folder)
    own, forced = [], []
    for index, rollout, _, _ in policy_ranks.rollouts():
        tokens = replay_ranks.tokens_of(rollout)
        own.append(replay_ranks.with_routes(rollout, routes.own_routes(model, tokens)[0][:-1].astype(np.uint8)))
        forced.append(
            replay_ranks.with_routes(rollout, routes.forced_routes(tokens, hf_config)) if index % 2 else own[-1]
        )
    settings = ("policy.router_replay.enabled=true", "loss_fn.reference_policy_kl_penalty=0.1")
    layout = "tp2 sp pp2 ep2"
    config = policy_ranks.run_config(moe_folder, layout, *settings)
    following, diverted = (
        ranks.run(replay_ranks.training, config, rollouts, world_size=policy_ranks.world_size(layout))
        for rollouts in (own, forced)
    )
    num_tokens = [len(rollout.routes) for rollout in own if rollout.routes is not None]
    for metrics, _ in following:
        assert metrics == following[0][0]
        assert metrics["train/router_mismatch"] == metrics["train/router_mismatch_worst_layer"] == 0
    for metrics, _ in diverted:
        assert metrics == diverted[0][0]
        expected = sum(num_tokens[1::2]) / sum(num_tokens)
        assert (
            0.9 * expected
            <= metrics["train/router_mismatch"]
            <= metrics["train/router_mismatch_worst_layer"]
            <= expected
        )
    assert following[0][0]["train/loss"] != diverted[0][0]["train/loss"]
    # The reference model chooses by itself, whatever the rollouts say.
    assert len(following[-1][1]) == 1
    assert np.array_equal(following[-1][1][0], diverted[-1][1][0])


def test_the_choices_of_a_router_replayed_change_no_bit(ranks: RankPool, moe_folder: Path):
    model = transformers_model(moe_folder)
    rollouts = []
    for _, rollout, _, _ in policy_ranks.rollouts():
        chosen, leads = routes.own_routes(model, replay_ranks.tokens_of(rollout))
        assert leads.min() > 1e-5
        # In another order than the router's.
        rollouts.append(replay_ranks.with_routes(rollout, chosen[:-1, :, ::-1].astype(np.uint8)))
    config = policy_ranks.run_config(moe_folder, "one", "policy.router_replay.enabled=true")
    (found,) = ranks.run(replay_ranks.mismatch, config, rollouts, 8, world_size=1)
    assert found.metrics["router_mismatch"] == 0
    assert np.array_equal(found.replayed, found.unreplayed)


def test_rollouts_without_routes_are_refused(ranks: RankPool, moe_folder: Path):
    config = policy_ranks.run_config(moe_folder, "one", "policy.router_replay.enabled=true")
    rollouts = [rollout for _, rollout, _, _ in policy_ranks.rollouts()]
    with pytest.raises(RuntimeError, match="policy.router_replay.enabled=true, but rollouts came without routes"):
        ranks.run(replay_ranks.training, config, rollouts, world_size=1)


@pytest.mark.long("parity")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_transformers_follow_routes_over_virtual_stages_and_recomputed(
    ranks: RankPool, tmp_path: Path, model_type: str
):
    folder = models.save_model(tmp_path, model_type)
    loss, grads = gradients_of(ranks, folder, 1, REPLAY)
    for world_size, megatron in map(sizes, ("pp2 vpp2, recomputed", "tp2 sp pp2 ep2")):
        parallel_loss, parallel_grads = gradients_of(ranks, folder, world_size, megatron | REPLAY)
        assert parallel_loss == pytest.approx(loss, rel=1e-6)
        assert_close(parallel_grads, grads, 1e-5)
    assert gradients_of(ranks, folder, 1, {})[0] != pytest.approx(loss, rel=1e-4)
