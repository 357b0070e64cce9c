import pytest

from mrl.config.schema import ClusterConfig, RunConfig
from mrl.config.schema_megatron import MegatronConfig
from mrl.config.schema_policy import PolicyConfig, SequencePackingConfig
from mrl.data.batch import make_batch, max_row_tokens
from mrl.types import Prompt, RolloutGroup, RolloutInfo, Verdict


def run_config(row_tokens: int = 32) -> RunConfig:
    """Two data-parallel ranks of TP2."""
    packing = SequencePackingConfig(train_mb_tokens=row_tokens, logprob_mb_tokens=row_tokens + 5, sequence_length_round=1)
    policy = PolicyConfig(
        model_name="m",
        make_sequence_length_divisible_by=2,
        sequence_packing=packing,
        megatron_cfg=MegatronConfig(tensor_model_parallel_size=2),
    )
    return RunConfig(policy=policy, cluster=ClusterConfig(num_nodes=1, gpus_per_node=0, cpu_units_per_node=4))


def group(name: str, lengths: list[int], statuses: list[str]) -> RolloutGroup:
    infos = [RolloutInfo(f"0/{name}/{i}", name, i, 1, 4, length, "stop", None) for i, length in enumerate(lengths)]
    verdicts = [Verdict(1.0, status == "ok", status, "", "") for status in statuses]  # type: ignore[arg-type]  # literals
    return RolloutGroup(Prompt(name, (1, 2, 3, 4), "q", "a", "math"), tuple(infos), tuple(verdicts))


def test_a_batch_by_hand():
    groups = [group("a", [5, 6], ["ok", "timeout"]), group("b", [7, 0], ["ok", "ok"])]
    batch = make_batch(groups, [[0.5, 9.0], [-1.0, 1.0]], run_config())
    assert [sequence.rollout.request_id for sequence in batch.sequences] == ["0/a/0", "0/a/1", "0/b/0", "0/b/1"]
    assert [sequence.advantage for sequence in batch.sequences] == [0.5, 0.0, -1.0, 1.0]
    assert [sequence.is_valid for sequence in batch.sequences] == [True, False, True, True]
    # A masked rollout and one without tokens do not count.
    assert (batch.num_valid_tokens, batch.num_valid_sequences) == (12, 2)
    # Lengths with prompts: 9, 10, 11, 4; longest first, each to the rank with fewer tokens.
    assert batch.rows == (((2, 3),), ((1, 0),))


def test_padding_stays_within_the_limit():
    config = run_config(row_tokens=33)
    assert (config.policy.row_multiple, max_row_tokens(config.policy)) == (2, 32)
    config.policy.sequence_packing.sequence_length_round = 5
    assert (config.policy.row_multiple, max_row_tokens(config.policy)) == (10, 30)


def test_context_parallelism_plans_with_padded_sequences():
    config = run_config(row_tokens=36)
    config.policy.megatron_cfg.context_parallel_size = 2
    assert (config.policy.sequence_multiple, config.policy.row_multiple) == (4, 4)
    # With prompts: 17 and 18 tokens, which a row of 36 would hold without their padding to 20.
    assert make_batch([group("a", [13, 14], ["ok", "ok"])], [[0.5, 1.0]], config).rows == (((0,), (1,)),)
    config.policy.megatron_cfg.sequence_parallel = True
    # A rank's part of a row, T / cp tokens, is cut once more, into tp parts.
    assert (config.policy.sequence_multiple, config.policy.row_multiple, max_row_tokens(config.policy)) == (4, 8, 32)


def test_a_rollout_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="train_mb_tokens"):
        make_batch([group("a", [40], ["ok"])], [[0.0]], run_config())
