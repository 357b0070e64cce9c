# SPDX-License-Identifier: Apache-2.0
"""Each cut against the literal operation that it stands for, written with reshape, split and concatenate."""

from __future__ import annotations

import numpy as np
import pytest

from conversion.boxes import SlotLayout
from conversion.cuts import (
    AxisRank,
    Canonical,
    ColumnParallel,
    Cutout,
    Experts,
    Qkv,
    Replicated,
    RowParallel,
    Section,
    Sections,
    Vocabulary,
)
from tests.unit.conversion.dense import PADDING, build, index_arrays

HIDDEN = 6


def attention(num_heads: int, num_groups: int, head_dim: int) -> Qkv:
    key_shape = (num_groups * head_dim, HIDDEN)
    return Qkv(
        Canonical("q", (num_heads * head_dim, HIDDEN)), Canonical("k", key_shape), Canonical("v", key_shape), head_dim
    )


def built(cutout: Cutout, canonical: dict[str, np.ndarray]) -> np.ndarray:
    return build(SlotLayout(cutout.shape, "int64", cutout.pieces, cutout.padding), canonical)


def megatron_qkv(query: np.ndarray, key: np.ndarray, value: np.ndarray, num_groups: int, head_dim: int) -> np.ndarray:
    """Megatron's fused matrix: per group its query heads, its key head, its value head."""
    heads = [array.reshape(num_groups, -1, head_dim, array.shape[1]) for array in (query, key, value)]
    return np.concatenate(heads, axis=1).reshape(-1, query.shape[1])


@pytest.mark.parametrize(("num_heads", "num_groups", "head_dim"), [(4, 2, 8), (8, 8, 4), (8, 1, 4), (32, 2, 4)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_megatron_interleaves_query_key_value_by_group(num_heads: int, num_groups: int, head_dim: int, tp: int):
    cut = attention(num_heads, num_groups, head_dim)
    canonical = index_arrays({tensor.name: tensor.shape for tensor in cut.tensors})
    fused = megatron_qkv(canonical["q"], canonical["k"], canonical["v"], num_groups, head_dim)
    for rank, block in enumerate(np.split(fused, tp)):
        assert np.array_equal(built(cut.megatron(AxisRank(tp, rank)), canonical), block)
    assert np.array_equal(built(cut.checkpoint()[""], canonical), fused)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_concatenates_query_key_value_and_repeats_key_heads(num_heads: int, num_groups: int, tp: int):
    head_dim = 4
    cut = attention(num_heads, num_groups, head_dim)
    canonical = index_arrays({tensor.name: tensor.shape for tensor in cut.tensors})
    repeats = max(1, tp // num_groups)
    keys, values = (
        np.repeat(canonical[name].reshape(num_groups, head_dim, HIDDEN), repeats, axis=0).reshape(-1, HIDDEN)
        for name in "kv"
    )
    blocks = [np.split(array, tp) for array in (canonical["q"], keys, values)]
    for rank in range(tp):
        assert np.array_equal(
            built(cut.vllm(AxisRank(tp, rank)), canonical), np.concatenate([block[rank] for block in blocks])
        )


def test_a_head_that_cannot_be_cut_is_refused():
    cut = attention(12, 4, 2)
    with pytest.raises(ValueError, match="size=8 does not divide the 12 heads of q"):
        cut.vllm(AxisRank(8, 0))
    with pytest.raises(ValueError, match="size=6 is no multiple of the 4 heads of k; use a multiple or a divisor"):
        cut.vllm(AxisRank(6, 0))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sections_are_cut_one_by_one(tp: int):
    sections = (Section("z", 16, 8), Section("x", 16, 8), Section("B", 8, 4), Section("C", 8, 4), Section("dt", 8, 8))
    canonical = index_arrays({"w": (56, HIDDEN)})
    cut = Sections(Canonical("w", (56, HIDDEN)), sections)
    whole = dict(zip(["z", "x", "B", "C", "dt"], np.split(canonical["w"], [16, 32, 40, 48]), strict=True))
    for rank in range(tp):
        expected = np.concatenate([np.split(section, tp)[rank] for section in whole.values()])
        assert np.array_equal(built(cut.megatron(AxisRank(tp, rank)), canonical), expected)
        assert np.array_equal(built(cut.vllm(AxisRank(tp, rank)), canonical), expected)
    for label, cutout in cut.checkpoint().items():
        assert np.array_equal(built(cutout, canonical), whole[label.removeprefix(".")])


def test_vllm_gives_every_worker_a_single_group_and_megatron_refuses_it():
    sections = (Section("x", 8, 4), Section("B", 3, 1))
    canonical = index_arrays({"w": (11,)})
    cut = Sections(Canonical("w", (11,)), sections)
    assert built(cut.vllm(AxisRank(2, 1)), canonical).tolist() == [4, 5, 6, 7, 8, 9, 10]
    with pytest.raises(
        ValueError, match="tensor_model_parallel_size=2 does not divide the 1 heads or groups in section B of w"
    ):
        cut.megatron(AxisRank(2, 1))


def test_columns_and_rows_and_replicas():
    canonical = index_arrays({"w": (4, 6)})
    tensor = Canonical("w", (4, 6))
    for rank in range(2):
        assert np.array_equal(
            built(ColumnParallel(tensor).megatron(AxisRank(2, rank)), canonical), np.split(canonical["w"], 2)[rank]
        )
        assert np.array_equal(
            built(RowParallel(tensor).vllm(AxisRank(2, rank)), canonical), np.split(canonical["w"], 2, axis=1)[rank]
        )
        assert np.array_equal(built(Replicated(tensor).vllm(AxisRank(2, rank)), canonical), canonical["w"])
    with pytest.raises(ValueError, match="does not divide the 4 rows of w; use a divisor of 4"):
        ColumnParallel(tensor).megatron(AxisRank(3, 0))


def test_only_vllm_transforms():
    column = ColumnParallel(Canonical("A_log", (4,)), transform="neg_exp")
    assert [piece.transform for piece in column.megatron(AxisRank(2, 0)).pieces] == [None]
    assert [piece.transform for piece in column.vllm(AxisRank(2, 0)).pieces] == ["neg_exp"]


@pytest.mark.parametrize("vocabulary", [64, 100, 264, 300])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_vocabulary_is_padded_before_it_is_cut(vocabulary: int, tp: int):
    canonical = index_arrays({"w": (vocabulary, 2)})
    cut = Vocabulary(Canonical("w", (vocabulary, 2)))
    for holder, multiple in ((cut.megatron, 128 * tp), (cut.vllm, 64)):
        padded = np.full((-(-vocabulary // multiple) * multiple, 2), PADDING)
        padded[:vocabulary] = canonical["w"]
        for rank, block in enumerate(np.split(padded, tp)):
            assert np.array_equal(built(holder(AxisRank(tp, rank)), canonical), block)


def test_a_checkpoint_keeps_the_padding_of_the_layout_that_wrote_it():
    tensor = Canonical("w", (264, 2))
    assert Vocabulary(tensor).checkpoint()[""].shape == (384, 2)
    cutout = Vocabulary(tensor, padded_rows=512).checkpoint()[""]
    assert (cutout.shape, cutout.padding) == ((512, 2), (((264, 512), (0, 2)),))


@pytest.mark.parametrize("kind", [ColumnParallel, RowParallel])
def test_experts_are_placed_then_cut(kind: type[ColumnParallel] | type[RowParallel]):
    shapes = {f"e{index}": (4, 6) for index in range(8)}
    canonical = index_arrays(shapes)
    experts = Experts(kind(Canonical("e{expert}", (4, 6))), 8)
    stacked = np.stack(list(canonical.values()))
    axis = 1 if kind is ColumnParallel else 2
    assert np.array_equal(built(experts.checkpoint()[""], canonical), stacked)
    for ep_rank in range(4):
        for rank in range(2):
            expected = np.split(np.split(stacked, 4)[ep_rank], 2, axis=axis)[rank]
            cutouts = experts.megatron(AxisRank(4, ep_rank), AxisRank(2, rank))
            assert np.array_equal(np.stack([built(cutout, canonical) for cutout in cutouts]), expected)
    # vLLM spreads 8 experts over 3 workers as 3, 3, 2.
    for worker, (start, stop) in enumerate([(0, 3), (3, 6), (6, 8)]):
        assert np.array_equal(built(experts.vllm(AxisRank(3, worker), AxisRank(1, 0)), canonical), stacked[start:stop])


def test_more_workers_than_experts_are_refused():
    experts = Experts(ColumnParallel(Canonical("e{expert}", (2, 2))), 1)
    with pytest.raises(ValueError, match="ep=2 is more than the 1 experts"):
        experts.vllm(AxisRank(2, 0, "ep"), AxisRank(1, 0))
