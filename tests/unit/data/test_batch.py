# SPDX-License-Identifier: Apache-2.0
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.policy import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from mrl.config.schema.run import ClusterConfig, RunConfig
from mrl.data.batch import make_batch, make_batches, max_row_tokens, plan_batch
from mrl.data.planning import SequenceCost
from mrl.types import Batch, RolloutInfo, TrainSequence
from tests.sources import ROOT

COST = SequenceCost(1.0, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(ROOT / "scripts" / "bench" / "models" / "nemotron3_nano_30b_a3b.config.json", folder / "config.json")
    return str(folder)


def policy_config(row_tokens: int = 32, *, model: str = "m", algorithm: str = "balanced") -> PolicyConfig:
    """TP2, rows of any even number of tokens."""
    packing = SequencePackingConfig(
        train_mb_tokens=row_tokens,
        logprob_mb_tokens=row_tokens,
        sequence_length_round=1,
        algorithm=algorithm,  # type: ignore[arg-type]  # a literal
    )
    return PolicyConfig(
        model_name=model,
        make_sequence_length_divisible_by=2,
        sequence_packing=packing,
        megatron_cfg=MegatronConfig(tensor_model_parallel_size=2),
    )


def batch(policy: PolicyConfig, sequences: list[TrainSequence]) -> Batch:
    """A batch of two data-parallel ranks."""
    cluster = ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_units_per_node=4)
    return make_batch(sequences, RunConfig(policy=policy, cluster=cluster))


def sequence(length: int, *, is_valid: bool = True) -> TrainSequence:
    return TrainSequence(RolloutInfo(f"0/a/{length}", "a", 0, 1, 4, length, "stop", None), 0.5, is_valid)


def test_a_batch_by_hand(model: str):
    sequences = [sequence(5), sequence(6, is_valid=False), sequence(7), sequence(0)]
    made = batch(policy_config(model=model), sequences)
    assert made.sequences == tuple(sequences)
    # A masked rollout and one without tokens do not count.
    assert (made.num_valid_tokens, made.num_valid_sequences) == (12, 2)
    # Lengths with prompts: 9, 10, 11, 4; longest first, each to the rank with fewer tokens.
    assert made.rows == made.logprob_rows == (((2, 3),), ((1, 0),))
    # 15 and 19 tokens of 32, in rows of 16 and 20. At these lengths work is as good as linear.
    assert made.metrics == pytest.approx(
        {
            "train/num_microbatches": 1.0,
            "train/packing_efficiency": 34 / 64,
            "train/padding_fraction": 2 / 36,
            "train/dp_balance_tokens": 19 / 17,
            "train/dp_balance_cost": 19 / 17,
        },
        rel=1e-3,
    )


def test_each_update_has_a_batch_of_its_own(model: str):
    sequences = [sequence(5), sequence(6, is_valid=False), sequence(7), sequence(1)]
    policy = policy_config(model=model)
    policy.train_global_batch_size = 2
    made = make_batches(
        sequences, RunConfig(policy=policy, cluster=ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_units_per_node=4))
    )
    assert [update.sequences for update in made] == [tuple(sequences[:2]), tuple(sequences[2:])]
    assert [update.num_valid_tokens for update in made] == [5, 8]


def test_logprob_passes_have_rows_of_their_own():
    lengths = [9, 10, 11, 4, 8, 6]
    policy = policy_config()
    policy.sequence_packing.logprob_mb_tokens = 14
    train, logprob = plan_batch(lengths, policy, dp_size=2, cost=COST)
    assert train == (((2, 4, 5),), ((1, 0, 3),))
    assert logprob == (((2,), (4, 5)), ((1, 3), (0,)))


@pytest.mark.parametrize(
    "algorithm",
    ["balanced", "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"],
)
def test_rows_in_order_of_their_tokens(algorithm: str):
    lengths = [3, 17, 20, 2, 30, 9, 9, 1]
    policy = policy_config(algorithm=algorithm)
    as_packed, _ = plan_batch(lengths, policy, dp_size=1, cost=COST)
    policy.sequence_packing.microbatch_order = "largest_first"
    (rows,), (logprob_rows,) = plan_batch(lengths, policy, dp_size=1, cost=COST)
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert set(rows) == set(as_packed[0]) and rows == logprob_rows and sizes == sorted(sizes, reverse=True)


def test_dynamic_batching_and_fixed_rows():
    lengths = [8, 1, 5, 3, 2, 8, 3, 4]
    policy = policy_config()
    policy.sequence_packing.enabled = False
    policy.train_micro_batch_size, policy.logprob_batch_size = 3, 4
    assert plan_batch(lengths, policy, dp_size=2, cost=COST) == (
        (((0, 1, 2), (3,)), ((4, 5, 6), (7,))),
        (((0, 1, 2, 3),), ((4, 5, 6, 7),)),
    )
    policy.dynamic_batching = DynamicBatchingConfig(
        True, train_mb_tokens=13, logprob_mb_tokens=32, sequence_length_round=2
    )
    assert plan_batch(lengths, policy, dp_size=2, cost=COST) == (
        (((1, 3), (7,), (0,)), ((4, 6), (2,), (5,))),
        (((1, 3, 7, 0),), ((4, 6, 2, 5),)),
    )


def test_padding_stays_within_the_limit():
    policy = policy_config(row_tokens=33)
    assert (policy.row_multiple, max_row_tokens(policy, "train")) == (2, 32)
    policy.sequence_packing.sequence_length_round = 5
    assert (policy.row_multiple, max_row_tokens(policy, "train"), max_row_tokens(policy, "logprob")) == (10, 30, 30)
    policy.sequence_packing.enabled = False
    policy.train_micro_batch_size, policy.logprob_batch_size, policy.max_total_sequence_length = 3, 1, 33
    assert (policy.row_multiple, max_row_tokens(policy, "train"), max_row_tokens(policy, "logprob")) == (2, 100, 34)
    policy.dynamic_batching = DynamicBatchingConfig(
        True, train_mb_tokens=70, logprob_mb_tokens=65, sequence_length_round=16
    )
    assert (policy.row_multiple, max_row_tokens(policy, "train"), max_row_tokens(policy, "logprob")) == (16, 64, 64)


def test_context_parallelism_plans_with_padded_sequences():
    policy = policy_config(row_tokens=36)
    policy.megatron_cfg.context_parallel_size = 2
    assert (policy.sequence_multiple, policy.row_multiple) == (4, 4)
    # 17 and 18 tokens, which a row of 36 would hold without their padding to 20.
    assert plan_batch([17, 18], policy, dp_size=1, cost=COST)[0] == (((0,), (1,)),)
    policy.megatron_cfg.sequence_parallel = True
    # A rank's part of a row, T / cp tokens, is cut once more, into tp parts.
    assert (policy.sequence_multiple, policy.row_multiple, max_row_tokens(policy, "train")) == (4, 8, 32)


def test_the_sequences_of_a_rollout_are_trained_in_one_update(model: str):
    """An update has so many rollouts, however many sequences they have."""
    further = RolloutInfo("0/a/9", "a", 9, 1, 4, 9, "stop", None, place=1)
    sequences = [
        sequence(5),
        TrainSequence(further, 0.5, True),
        sequence(6),
        sequence(7),
        TrainSequence(further, 0.5, True),
        sequence(8),
    ]
    policy = policy_config(model=model)
    policy.train_global_batch_size = 2
    cluster = ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_units_per_node=4)
    batches = make_batches(sequences, RunConfig(policy=policy, cluster=cluster))
    assert [list(made.sequences) for made in batches] == [sequences[:3], sequences[3:]]
    assert [made.num_valid_tokens for made in batches] == [20, 24]


def grouped(*, prompt: int) -> list[TrainSequence]:
    """Two groups of four rollouts of 10 tokens."""
    infos = [
        RolloutInfo(f"0/{prompt_id}/{index}", prompt_id, index, 1, prompt, 10, "stop", None)
        for prompt_id in "ab"
        for index in range(4)
    ]
    return [TrainSequence(info, 0.5, True) for info in infos]


def test_auto_shares_by_the_tokens_of_the_batch(model: str):
    policy = policy_config(256, model=model)
    shared = batch(policy, grouped(prompt=20))
    # 8 x 30 tokens, of which 2 x 20 + 8 x 10 are computed; each group is in one row.
    assert (shared.shares_prefixes, shared.metrics["train/prefix_sharing"]) == (True, 2.0)
    assert sorted(shared.rows) == [((0, 1, 2, 3),), ((4, 5, 6, 7),)]
    whole = batch(replace(policy, share_prefixes=False), grouped(prompt=20))
    assert not whole.shares_prefixes
    assert "train/prefix_sharing" not in whole.metrics


def test_further_batches_need_no_file_of_the_model(model: str, tmp_path: Path):
    """The file system of the model may be slow, or have been cleaned up."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    policy = policy_config(256, model=str(folder))
    first = batch(policy, grouped(prompt=20))
    shutil.rmtree(folder)
    assert batch(policy, grouped(prompt=20)) == first


def test_auto_leaves_a_batch_that_saves_little_as_it_is(model: str):
    policy = policy_config(256, model=model)
    # A prompt of 15 tokens is not worth a node of its own; one of 20 beside replies of 200 saves a fifth.
    for given in (grouped(prompt=15), [*grouped(prompt=20), sequence(200), sequence(200), sequence(200)]):
        made = batch(policy, given)
        assert made == batch(replace(policy, share_prefixes=False), given)
        assert batch(replace(policy, share_prefixes=True), given).shares_prefixes
