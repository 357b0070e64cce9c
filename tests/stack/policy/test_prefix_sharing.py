# SPDX-License-Identifier: Apache-2.0
"""Rows whose sequences share the tokens of their beginnings, against the same sequences whole, and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mrl.config.sharing import OF_ROWS
from mrl.types import Rollout, TrainSequence
from tests.parity import Parity, hf_scores
from tests.stack.policy import prefix_ranks
from tests.stack.policy.layouts import put_together, transformers_model, worst_error
from tests.stack.policy.parity import run_config, save_example
from tests.stack.policy.parity_cells import ALLGATHER, EP2, ONE_RANK, PP2, RECOMPUTE, REPLAY, TP2, VIRTUAL, Settings
from tests.stack.policy.prefix_ranks import Measured, agent_sequences, rollouts, sequences
from tests.stack.ranks import RankPool

MAX_GRADIENT_ERROR = 5e-6
"""L2, relative, of the worst tensor: that of another order of float32 sums, as other rows without sharing give, too."""


def balance(kind: str) -> Settings:
    return {"megatron_cfg.moe_router_load_balancing_type": kind, "megatron_cfg.moe_aux_loss_coeff": 0.1}


ONE_ROW: Settings = {f"sequence_packing.{stage}_mb_tokens": 2048 for stage in ("train", "logprob")}
CELLS = [
    ("qwen3", {}, 1),
    ("qwen3", {**PP2, "logprob_chunk_size": 24}, 2),
    ("qwen3_moe", {**TP2, **EP2, **balance("seq_aux_loss")}, 4),
    ("qwen3_moe", {**PP2, **VIRTUAL, **RECOMPUTE}, 2),
    ("nemotron_h", balance("seq_aux_loss"), 1),
    ("nemotron_h", {**EP2, **ALLGATHER, **balance("global_aux_loss")}, 2),
    # These two losses depend on the rows, so that both need the same: one of all sequences on a rank.
    ("nemotron_h", {**TP2, **balance("aux_loss"), **ONE_ROW}, 2),
    ("nemotron_h", {**TP2, **PP2, **EP2, **RECOMPUTE}, 4),
]


AGENT_CELLS = [
    ("nemotron_h", {}, 1),
    ("nemotron_h", {**TP2, **EP2, **balance("seq_aux_loss")}, 2),
    ("qwen3_moe", {**PP2, **RECOMPUTE}, 2),
    ("qwen3", {**TP2}, 2),
]


@dataclass(frozen=True)
class Result:
    """Joint measurements of all ranks."""

    parts: list[Measured]

    @property
    def metrics(self) -> list[dict[str, float]]:
        assert all(part.metrics == self.parts[0].metrics for part in self.parts)
        return self.parts[0].metrics

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return put_together([part.gradients for part in self.parts])

    def logprobs(self, name: str) -> dict[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for part in self.parts:
            found |= part.logprobs[name]
        return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda model_type: save_example(tmp_path_factory.mktemp(model_type), model_type))


def steps(
    ranks: RankPool, folder: Path, settings: Settings, num_ranks: int, given: list[TrainSequence], num_steps: int = 3
) -> Result:
    """Steps with rows of up to 640 tokens, in which most groups are whole."""
    rows = {f"sequence_packing.{stage}_mb_tokens": 640 for stage in ("train", "logprob")}
    kl = {"megatron_cfg.track_moe_metrics": True}
    config = run_config(folder, {**ONE_RANK, **rows, **kl, **settings}, num_ranks)
    config.loss_fn.reference_policy_kl_penalty = 0.1
    return Result(ranks.run(prefix_ranks.measure, config, given, num_steps, world_size=num_ranks))


def assert_equal(shared: Result, whole: Result, num_sequences: int) -> None:
    """All metrics, logprobs and gradients agree to the last digits of float32."""
    for of_shared, of_whole in zip(shared.metrics, whole.metrics, strict=True):
        of_rows = {name for name in of_whole if name.startswith(("train/packing", "train/padding", "train/dp_balance"))}
        names = of_whole.keys() - of_rows - {"train/num_microbatches"}
        assert of_shared.keys() - of_whole.keys() <= {"train/prefix_sharing"}
        # A loss is a sum of terms of either sign, much larger than itself.
        assert {name: of_shared[name] for name in names} == pytest.approx(
            {name: of_whole[name] for name in names}, rel=5e-6, abs=1e-6
        )
    for name in ("old_logprobs_T", "reference_logprobs_T"):
        theirs = whole.logprobs(name)
        assert set(theirs) == set(range(num_sequences))
        for index, logprobs in shared.logprobs(name).items():
            assert logprobs == pytest.approx(theirs[index], rel=1e-6, abs=0)
    name, error = worst_error(shared.gradients, whole.gradients)
    assert error <= MAX_GRADIENT_ERROR, (name, error)


@pytest.mark.parametrize(("model_type", "settings", "num_ranks"), CELLS, ids=str)
def test_shared_prefixes_change_no_step(
    ranks: RankPool, folder_of: Callable[[str], Path], model_type: str, settings: Settings, num_ranks: int
):
    given = sequences(rollouts())
    whole, shared = (
        steps(ranks, folder_of(model_type), {**settings, "share_prefixes": shares}, num_ranks, given)
        # `auto` never shares under a loss that depends on the rows.
        for shares in (False, "auto" if not set(OF_ROWS) & set(map(str, settings.values())) else True)
    )
    assert max(part.computed_share for part in shared.parts) < 0.8
    assert_equal(shared, whole, len(given))


@pytest.mark.parametrize(("model_type", "settings", "num_ranks"), AGENT_CELLS, ids=str)
def test_trees_of_turns_change_no_step(
    ranks: RankPool, folder_of: Callable[[str], Path], model_type: str, settings: Settings, num_ranks: int
):
    given = agent_sequences()
    whole, shared = (
        steps(ranks, folder_of(model_type), {**settings, "share_prefixes": shares}, num_ranks, given)
        for shares in (False, "auto")
    )
    assert max(part.computed_share for part in shared.parts) < 0.7
    assert all(part.num_levels >= prefix_ranks.NUM_TURNS for part in shared.parts)
    assert_equal(shared, whole, len(given))


def test_shared_prefixes_give_the_logprobs_of_transformers(ranks: RankPool, folder_of: Callable[[str], Path]):
    folder, given = folder_of("nemotron_h"), rollouts()
    shared = steps(ranks, folder, {"share_prefixes": True}, 1, sequences(given), num_steps=1)
    model, parity = transformers_model(folder), Parity()
    for index, logprobs in shared.logprobs("old_logprobs_T").items():
        prompt, tokens = given[index].request.token_ids, given[index].token_ids.tolist()
        parity.add(logprobs[len(prompt) - 1 : -1], hf_scores(model, prompt, tokens))
    parity.check(min_tokens=sum(len(rollout.token_ids) for rollout in given))


def test_engines_that_chose_other_experts_share_no_tokens(ranks: RankPool, folder_of: Callable[[str], Path]):
    """The routes of two rollouts of each group differ from all others' at the prompt's 11th token."""
    folder, given = folder_of("qwen3_moe"), list[Rollout]()
    for index, rollout in enumerate(rollouts()):
        length = len(rollout.request.token_ids) + len(rollout.token_ids) - 1
        # By token alone, so that equal beginnings have equal routes.
        tokens = np.array([*rollout.request.token_ids, *rollout.token_ids])[:length]
        chosen = np.stack([tokens % 8, (tokens + 1 + tokens // 8 % 7) % 8], axis=-1).astype(np.uint8)
        routes = np.repeat(chosen[:, None], 4, axis=1)
        if index % prefix_ranks.GROUP_SIZE in (1, 2):
            routes[10] = (routes[10] + index % prefix_ranks.GROUP_SIZE) % 8
        given.append(replace(rollout, routes=routes))
    made = sequences(given)
    whole, shared = (steps(ranks, folder, {**REPLAY, "share_prefixes": shares}, 1, made) for shares in (False, True))
    # 0.5 if the routes were the same.
    assert 0.55 < shared.parts[0].computed_share < 0.8
    assert_equal(shared, whole, len(given))
