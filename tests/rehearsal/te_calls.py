# SPDX-License-Identifier: Apache-2.0
"""Tiny models with Transformer Engine layers on the CPU: its Python around kernels of plain torch, beside transformers.

Each kernel is called through the signature of the function or method that Transformer Engine has in its place. Runs in
the process of gpu_rows.py, as its last part: nothing is put back.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from conversion.files.safetensors import fill_layout
from tests import models
from tests.parity import Parity, hf_scores
from tests.rehearsal.gpu_host import Rank, as_rank

CASES: dict[str, dict[str, object]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "llama": {},
    "mixtral": {},
    "nemotron_h": dict(moe_latent_size=32),
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": dict(mlp_only_layers=[1]),
    "qwen3_next": {},
}
"""Changes, by model_type, of tests.models.TINY."""
WITHOUT_TREES = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
FUSED = tuple(
    f"policy.megatron_cfg.{key}=true" for key in ("moe_permute_fusion", "apply_rope_fusion", "activation_checkpointing")
)
ATTENTION, LINEAR = "DotProductAttention.forward", "Linear.forward"
ROTARY, PERMUTE, UNPERMUTE = "apply_rotary_pos_emb", "moe_permute_with_probs", "moe_unpermute"
SORT = "moe_sort_chunks_by_index"
GEMM = "general_gemm"


@dataclass(frozen=True)
class Row:
    """One model."""

    model_type: str
    num_tokens: int
    num_excluded: int
    num_reached: int
    num_wrong: int
    max_difference: float
    """Largest difference of tokens' logprobs from transformers'."""
    without_gradient: list[str]
    """Trained weights, but experts, that a backward pass leaves without a gradient."""
    kernels: list[str]
    """Kernels that Megatron has called."""
    shared_difference: float | None
    """Largest difference of logprobs with shared prefixes from those of whole rows; None: it computes no trees."""


Kernel = Callable[[SimpleNamespace], object]


def attention(given: SimpleNamespace) -> Tensor:
    """Attention over packed sequences, in plain torch."""
    from mrl.policy.packed import packed_attention

    assert given.qkv_format == "thd"
    # Of two tensors, equal or not, Transformer Engine infers padding between sequences, which not every kernel
    # takes.
    assert given.cu_seqlens_q_padded is given.cu_seqlens_q and given.cu_seqlens_kv_padded is given.cu_seqlens_kv
    query, key, value = given.query_layer, given.key_layer, given.value_layer
    if given.attn_mask_type == "padding_causal_bottom_right":
        return bottom_right(query, key, value, given.cu_seqlens_q, given.cu_seqlens_kv, given.self.softmax_scale)
    assert given.attn_mask_type == "padding_causal"
    (before, after), sinks_H = given.self.window_size, given.self.softmax_offset
    assert after == 0
    found = packed_attention(
        *(query, key, value, given.cu_seqlens_q),
        scale=given.self.softmax_scale,
        window=None if before < 0 else before + 1,
        sinks_H=sinks_H,
    )
    return found.flatten(1)


def kernels() -> dict[str, tuple[object, str, Kernel]]:
    """Kernels by name: place, name in Megatron, what computes instead, from arguments by Transformer Engine's names."""
    import transformer_engine.pytorch as te
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    def norm_of(module: torch.nn.Module, inp: Tensor, weight: Tensor) -> Tensor:
        factor = 1 + weight if module.zero_centered_gamma else weight
        return F.rms_norm(inp, inp.shape[-1:], factor, cast(float, module.eps))

    def linear(given: SimpleNamespace) -> Tensor | tuple[Tensor, Tensor]:
        if given.self.return_bias:
            return F.linear(given.inp, given.self.weight), given.self.bias
        return F.linear(given.inp, given.self.weight, given.self.bias if given.self.use_bias else None)

    def norm_linear(given: SimpleNamespace) -> Tensor | tuple[Tensor, Tensor]:
        assert given.self.normalization == "RMSNorm"
        given.inp = norm_of(given.self, given.inp, given.self.layer_norm_weight)
        return linear(given)

    def grouped_linear(given: SimpleNamespace) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        module, parts = given.self, given.inp.split(list(map(int, given.m_splits)))
        weights = [getattr(module, f"weight{index}") for index in range(len(parts))]
        biases = [getattr(module, f"bias{index}") if module.use_bias else None for index in range(len(parts))]
        added = [None] * len(parts) if module.return_bias else biases
        found = torch.cat([F.linear(*one) for one in zip(parts, weights, added, strict=True)])
        return (found, biases) if module.return_bias else found

    def rotary(given: SimpleNamespace) -> Tensor:
        assert given.tensor_format == "thd" and given.fused and (given.cp_size, given.cp_rank) == (1, 0)
        group = parallel_state.get_context_parallel_group()
        return rope_utils._apply_rotary_pos_emb_thd(
            given.t, given.cu_seqlens, given.freqs, given.interleaved, cp_group=group
        )

    def permute(given: SimpleNamespace) -> object:
        # Newer ones add paddings of experts, which quantization needs.
        return moe_utils.permute(given.inp, given.routing_map, given.probs, given.num_out_tokens)[:3]

    def unpermute(given: SimpleNamespace) -> Tensor:
        return moe_utils.unpermute(given.inp, given.row_id_map, given.restore_shape, given.merging_probs)

    def sort_with_probs(given: SimpleNamespace) -> object:
        return moe_utils.sort_chunks_by_idxs(given.inp, given.split_sizes, given.sorted_index, given.probs)

    def sort(given: SimpleNamespace) -> Tensor:
        return moe_utils.sort_chunks_by_idxs(given.inp, given.split_sizes, given.sorted_index)[0]

    def gemm(given: SimpleNamespace) -> tuple[Tensor]:
        first, second = (
            (given.B.t() if given.layout[1] == "T" else given.B),
            (given.A.t() if given.layout[0] == "T" else given.A),
        )
        found = first.to(given.out_dtype) @ second.to(given.out_dtype)
        return (found if given.bias is None else found + given.bias,)

    return {
        GEMM: (extension, "general_gemm", gemm),
        LINEAR: (te.Linear, "forward", linear),
        "LayerNormLinear.forward": (te.LayerNormLinear, "forward", norm_linear),
        "GroupedLinear.forward": (te.GroupedLinear, "forward", grouped_linear),
        "RMSNorm.forward": (te.RMSNorm, "forward", lambda given: norm_of(given.self, given.input, given.self.weight)),
        ATTENTION: (te.DotProductAttention, "forward", attention),
        ROTARY: (extension, "apply_rotary_pos_emb", rotary),
        PERMUTE: (moe_utils, "fused_permute_with_probs", permute),
        UNPERMUTE: (moe_utils, "fused_unpermute", unpermute),
        SORT: (moe_utils, "fused_sort_chunks_by_index", sort),
        f"{SORT}_with_probs": (moe_utils, "fused_sort_chunks_by_index_with_probs", sort_with_probs),
    }


def bottom_right(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, scale: float | None
) -> Tensor:
    """Attention of sequences with as many keys or more than queries, the last of which sees all keys."""
    outputs, bounds = [], zip(queries.tolist(), queries.tolist()[1:], keys.tolist(), keys.tolist()[1:], strict=False)
    for start, stop, first, last in bounds:
        q, k, v = (t.transpose(0, 1)[None] for t in (query[start:stop], key[first:last], value[first:last]))
        mask = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - (stop - start))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def replace_kernels(called: set[str]) -> None:
    """Puts the kernels in. A call notes its name in `called`, and raises TypeError if its arguments do not fit."""

    def bound(name: str, original: Callable[..., object], kernel: Kernel) -> Callable[..., object]:
        signature = inspect.signature(original)

        def call(*args: object, **kwargs: object) -> object:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            called.add(name)
            return kernel(SimpleNamespace(**arguments.arguments))

        return call

    for name, (owner, attribute, kernel) in kernels().items():
        setattr(owner, attribute, bound(name, getattr(owner, attribute), kernel))


def rows(folder: Path) -> Iterator[Row]:
    # Its package imports Megatron.
    from mrl.policy.logprobs import TokenDistribution
    from mrl.policy.step import _forward, compute_logprobs
    from tests.stack.policy.policy_ranks import pack_rows, plan_of, rollouts, run_config

    called: set[str] = set()
    replace_kernels(called)
    for model_type, changed in CASES.items():
        called.clear()
        model = models.tiny_model(model_type, 0, **changed)
        model.save_pretrained(folder / model_type)
        config = run_config(folder / model_type, "one", *FUSED)
        hf_config = json.loads((folder / model_type / "config.json").read_text())
        with as_rank(config.policy, 0, 1):
            built = Rank(config.policy, hf_config, "cpu")
            fill_layout(folder / model_type, built.layout, built.tensors)
            packed = pack_rows(config.policy, plan_of("balanced", 1)[0][0])
            distribution = TokenDistribution.of(config.policy, hf_config["vocab_size"], is_sampled=True)
            logprobs = compute_logprobs(built.chunks, packed, distribution)
            parity, sequences = Parity(), rollouts()
            for row, logprobs_T in zip(packed, logprobs, strict=True):
                for place, index in enumerate(row.sequence_indices):
                    rollout = sequences[index][1]
                    start = int(row.cu_seqlens[place]) + len(rollout.request.token_ids) - 1
                    ours = logprobs_T[start : start + len(rollout.token_ids)].numpy()
                    parity.add(ours, hf_scores(model, rollout.request.token_ids, rollout.token_ids.tolist()))
            # Layers are computed again on the way back, as the packaged runs have it.
            for row in packed:
                _forward(built.chunks[0], row).square().sum().backward()
            weights = dict(built.chunks[0].module.named_parameters())
            # No token may have chosen an expert.
            zero = [
                name
                for name, weight in weights.items()
                if ".experts." not in name and weight.requires_grad and not weight.main_grad.any()
            ]
        found, shared = sorted(called), None
        if model_type not in WITHOUT_TREES:
            shared = shared_difference(folder / model_type, hf_config)
        yield Row(model_type, **asdict(parity), without_gradient=zero, kernels=found, shared_difference=shared)


def shared_difference(folder: Path, hf_config: dict[str, object]) -> float:
    """Compares logprobs of groups of rollouts in rows that are trees with those in whole rows, by the same model."""
    from mrl.data.batch import make_batch
    from mrl.data.packing import by_sequence
    from mrl.data.prefixes import add_trees
    from mrl.policy.logprobs import TokenDistribution
    from mrl.policy.step import compute_logprobs
    from tests.stack.policy.policy_ranks import pack_rows, run_config
    from tests.stack.policy.prefix_ranks import rollouts, sequences

    config = run_config(folder, "one", *FUSED, "policy.share_prefixes=true")
    batch = make_batch(sequences(rollouts()), config)
    ways = []
    with as_rank(config.policy, 0, 1):
        built = Rank(config.policy, hf_config, "cpu")
        fill_layout(folder, built.layout, built.tensors)
        distribution = TokenDistribution.of(config.policy, cast(int, hf_config["vocab_size"]), is_sampled=True)
        for shares in (False, True):
            rows = pack_rows(config.policy, batch.rows[0], dict(enumerate(batch.sequences)))
            if shares:
                add_trees(rows, divisible_by=config.policy.row_multiple)
                assert all(row.tree is not None and len(row.tree.levels) > 1 for row in rows)
            found = {}
            for row, logprobs_T in zip(rows, compute_logprobs(built.chunks, rows, distribution), strict=True):
                found |= by_sequence(row, logprobs_T * row.generated_mask_T)
            ways.append(found)
    return max(float(abs(ways[0][index] - values).max()) for index, values in ways[1].items())
