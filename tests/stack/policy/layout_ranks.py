# SPDX-License-Identifier: Apache-2.0
"""Functions on the ranks of layout tests: loss, gradients, logprobs of a Hugging Face folder in a parallel layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file

from conversion.boxes import Layout, Slot
from conversion.families.registry import family
from conversion.tensors import box_view
from mrl.config.schema.megatron import OptimizerConfig, SchedulerConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.data.packing import PackedRow, pack_routes, padded_length
from tests import routes
from tests.reading import read_canonical
from tests.stack.ranks import Rank


def policy_config(precision: Literal["float32", "bfloat16"] = "float32", /, **megatron: object) -> PolicyConfig:
    """A policy with these Megatron settings, and replicated gradients, so that every rank holds whole sums.

    With `router_replay=True` its routers follow the routes of `tests.routes.forced_routes`. Rows are padded to
    `row_multiple`.
    """
    # A run decides about prefixes; these are not of a run.
    config = PolicyConfig(model_name="-", precision=precision, max_total_sequence_length=1280, share_prefixes=False)
    config.make_sequence_length_divisible_by = int(str(megatron.pop("row_multiple", 1)))
    config.sequence_packing.sequence_length_round = 1
    config.megatron_cfg.optimizer = OptimizerConfig(
        # With a small epsilon, a gradient of nothing but rounding makes a step as long as any other.
        lr=1e-3,
        min_lr=1e-3,
        adam_eps=1e-3,
        clip_grad=1.0,
        bf16=precision == "bfloat16",
    )
    config.megatron_cfg.scheduler = SchedulerConfig(start_weight_decay=0.01, end_weight_decay=0.01)
    config.router_replay.enabled = bool(megatron.pop("router_replay", False))
    defaults = dict(moe_router_dtype="fp32", freeze_moe_router=False)
    for key, value in {**defaults, **megatron}.items():
        setattr(config.megatron_cfg, key, value)
    config.megatron_cfg.optimizer.use_distributed_optimizer = False
    config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather = False
    return config


def packed_row(sequences: list[list[int]], config: PolicyConfig | None = None) -> PackedRow:
    """A row in which every token but the first of a sequence is a generated one; its advantage grows along the row.

    With `config`, sequences and row are padded as its layout asks.
    """
    multiple, row_multiple = (config.sequence_multiple, config.row_multiple) if config else (1, 1)
    places = token_places(sequences, multiple)
    padded = torch.tensor([padded_length(len(sequence), multiple) for sequence in sequences])
    num_tokens = padded_length(int(padded.sum()), row_multiple)
    if num_tokens > padded.sum():
        padded = torch.cat([padded, (num_tokens - padded.sum())[None]])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), padded.cumsum(0)])
    tokens, labels = torch.full((num_tokens,), 256), torch.zeros(num_tokens, dtype=torch.int64)
    tokens[places] = torch.tensor([token for sequence in sequences for token in sequence])
    labels[places] = torch.tensor([token for sequence in sequences for token in [*sequence[1:], 0]])
    has_label, advantages = torch.zeros(2, num_tokens)
    has_label[places] = torch.cat([torch.tensor([1.0] * (len(sequence) - 1) + [0.0]) for sequence in sequences])
    advantages[places] = torch.linspace(0.5, 2.0, len(places)) * has_label[places]
    return PackedRow(
        token_ids_T=tokens,
        position_ids_T=torch.cat([torch.arange(length) for length in padded.tolist()]),
        labels_T=labels,
        loss_mask_T=has_label,
        generated_mask_T=has_label,
        generator_logprobs_T=torch.zeros(num_tokens),
        advantages_T=advantages,
        fixed_advantages_T=torch.full((num_tokens,), torch.nan),
        cu_seqlens=bounds.int(),
        max_seqlen=int(padded.max()),
        sequence_indices=list(range(len(sequences))),
        lengths=[len(sequence) for sequence in sequences],
        rewards=[1.0] * len(sequences),
    )


def token_places(sequences: list[list[int]], multiple: int) -> torch.Tensor:
    """Positions of sequences' tokens in a row in which each sequence is padded to a multiple."""
    places, start = [], 0
    for sequence in sequences:
        places.append(start + torch.arange(len(sequence)))
        start += padded_length(len(sequence), multiple)
    return torch.cat(places)


def gradients(
    rank: Rank,
    config: PolicyConfig,
    folder: Path,
    rows: list[list[list[int]]],
    scored: list[list[list[int]]] | None = None,
) -> tuple[float, dict[str, np.ndarray], list[np.ndarray]]:
    """Loss and gradients, by canonical name if this rank holds them, and logprobs of `scored` rows, as of `logprobs`.

    Data-parallel ranks take every dp_size-th row. The loss is the sum of advantage * logprob over all rows, divided by
    their number.
    """
    from mrl.policy import parallel
    from mrl.policy.weights import table_name

    chunks, layout, _ = _build(rank, config, folder)
    found = _logprobs(chunks, config, folder, scored) if scored else []
    for chunk in chunks:
        chunk.zero_grad_buffer()
    loss = _forward_backward(chunks, config, folder, rows)
    grads = {
        Slot(table_name(name.removeprefix("module.")), index): parameter.main_grad
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
    result = canonical_values(grads, layout, _shapes(folder))
    parallel.shutdown()
    return loss, result, found


def logprobs(rank: Rank, config: PolicyConfig, folder: Path, rows: list[list[list[int]]]) -> list[np.ndarray]:
    """Log-probability of every label by row, on the last stage; every rank takes all rows."""
    from mrl.policy import parallel

    chunks, _, _ = _build(rank, config, folder)
    result = _logprobs(chunks, config, folder, rows)
    parallel.shutdown()
    return result


def _logprobs(chunks: list, config: PolicyConfig, folder: Path, rows: list[list[list[int]]]) -> list[np.ndarray]:
    from mrl.policy.logprobs import TokenDistribution
    from mrl.policy.step import compute_logprobs

    distribution = TokenDistribution.of(config, _vocab_size(folder))
    of_rows = compute_logprobs(chunks, _rows(config, folder, rows), distribution, _replay(chunks, config, folder))
    places = [token_places(row, config.sequence_multiple) for row in rows]
    return [logprobs_T[place].numpy() for logprobs_T, place in zip(of_rows, places, strict=bool(of_rows))]


def train(
    rank: Rank, config: PolicyConfig, folder: Path, rows: list[list[list[int]]], num_steps: int
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loss and gradient norm of each of `num_steps` on the same rows; routers' weights and biases before and after."""
    from mrl.policy import parallel
    from mrl.policy.moe import take_routing, update_expert_biases
    from mrl.policy.optimizer import build_optimizer, build_scheduler

    chunks, _, tensors = _build(rank, config, folder)
    optimizer = build_optimizer(chunks, config.megatron_cfg)
    scheduler = build_scheduler(optimizer, config.megatron_cfg, num_train_steps=num_steps)
    routers = {slot.name: tensor for slot, tensor in tensors.items() if ".router." in slot.name}
    before, steps = _copies(routers), []
    for _ in range(num_steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _forward_backward(chunks, config, folder, rows)
        _, grad_norm, _ = optimizer.step()
        routing = take_routing(chunks, loss_type=config.megatron_cfg.moe_router_load_balancing_type)
        update_expert_biases(chunks, routing, rate=config.megatron_cfg.moe_router_bias_update_rate)
        scheduler.step(increment=1)
        steps.append((loss, float(grad_norm)))
    if config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    after = _copies(routers)
    parallel.shutdown()
    return steps, before, after


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


def transformers_beside_megatron(rank: Rank, folder: Path, sequence: list[int]) -> np.ndarray:
    """Logits of transformers in a process in which `cpu.install` has run."""
    from mrl.policy import cpu

    cpu.install()
    from transformers import NemotronHForCausalLM

    from tests import models

    model = models.unclamp_dt(NemotronHForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0].numpy()


def _forward_backward(chunks: list, config: PolicyConfig, folder: Path, rows: list[list[list[int]]]) -> float:
    """Loss of this rank's rows, 0 on all but the last stage; gradients are in the chunks' buffers."""
    from megatron.core import parallel_state

    from mrl.policy.batch import global_batch_size, own_positions
    from mrl.policy.logprobs import TokenDistribution
    from mrl.policy.objectives import Objective
    from mrl.policy.output import token_scores
    from mrl.policy.step import forward_backward

    distribution = TokenDistribution.of(config, _vocab_size(folder))
    replay = _replay(chunks, config, folder)

    def row_loss(
        output: torch.Tensor, row: PackedRow, model: torch.nn.Module
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs_T = token_scores(model, output, row, distribution).logprobs_T
        loss = (logprobs_T * row.advantages_T[own_positions(row)].to(output.device)).sum() / len(rows)
        return loss, {"loss": loss.detach()}

    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = _rows(config, folder, rows[dp_rank::dp_size])
    if len(chunks) > 1:
        # As `Policy` does: rows without a loss make up a multiple of the stages.
        empty = dataclasses.replace(
            mine[-1], advantages_T=torch.zeros_like(mine[-1].advantages_T), sequence_indices=[], lengths=[], rewards=[]
        )
        mine += [empty] * (-len(mine) % config.megatron_cfg.pipeline_model_parallel_size)
    objective = Objective(row_loss)
    metrics = forward_backward(chunks, mine, size=global_batch_size(mine), objective=objective, replay=replay)
    return sum(float(row["loss"]) for row in metrics)


def _rows(config: PolicyConfig, folder: Path, rows: list[list[list[int]]]) -> list[PackedRow]:
    packed = [packed_row(row, config) for row in rows]
    if not config.router_replay.enabled:
        return packed
    arrays = [[routes.forced_routes(sequence, _hf_config(folder)) for sequence in row] for row in rows]
    return [
        dataclasses.replace(row, routes=pack_routes(each, row.cu_seqlens[: len(each)].tolist(), len(row.token_ids_T)))
        for row, each in zip(packed, arrays, strict=True)
    ]


def _replay(chunks: list, config: PolicyConfig, folder: Path):
    from mrl.policy.moe import RouterReplay

    hf_config = _hf_config(folder)
    return RouterReplay(chunks, family(hf_config).expert_layers(hf_config)) if config.router_replay.enabled else None


def _build(rank: Rank, config: PolicyConfig, folder: Path):
    from megatron.core.utils import unwrap_model

    from mrl.policy import parallel
    from mrl.policy.lora import attach_adapters
    from mrl.policy.model import build_model, live_layout, wrap_ddp
    from mrl.policy.weights import rank_tensors

    megatron = config.megatron_cfg
    rank.initialize(megatron)

    layout = live_layout(config, _hf_config(folder), parallel.coordinates())
    bare_chunks = build_model(config, _hf_config(folder))
    lora = attach_adapters(bare_chunks, config, _hf_config(folder), seed=1)
    layout = layout | lora.layout
    chunks = wrap_ddp(bare_chunks, config)
    tensors = rank_tensors(unwrap_model(chunks), layout)
    whole = _load(folder)
    for slot, slot_layout in layout.items():
        tensors[slot].data.zero_()
        for piece in slot_layout.pieces:
            box_view(tensors[slot], piece.local).copy_(
                box_view(whole[piece.name], piece.box).view(_lengths(piece.local))
            )
    return chunks, layout, tensors


def canonical_values(
    tensors: Mapping[Slot, torch.Tensor], layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Values of this rank's tensors in whole canonical ones; NaN where this rank holds none."""
    result: dict[str, np.ndarray] = {}
    for slot, tensor in tensors.items():
        for piece in layout[slot].pieces:
            whole = result.setdefault(piece.name, np.full(shapes[piece.name], np.nan, dtype=np.float32))
            box = tuple(slice(start, stop) for start, stop in piece.box)
            whole[box] = box_view(tensor, piece.local).cpu().numpy().reshape(whole[box].shape)
    return result


def _lengths(box: tuple[tuple[int, int], ...]) -> list[int]:
    return [stop - start for start, stop in box]


def _hf_config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def _vocab_size(folder: Path) -> int:
    return int(str(_hf_config(folder)["vocab_size"]))


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """Weights, and the factors of adapters where a test wrote some."""
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return stored | read_canonical(folder)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _load(folder).items()}
