# SPDX-License-Identifier: Apache-2.0
"""Expert routing: Megatron layer arguments, a router aware of its row, a dispatcher for any row length, router replay.

Megatron's own router treats a row as one sequence and padding as tokens, and weights rows' auxiliary losses by numbers
of tokens that differ between layouts.
Shape suffixes: T tokens of a row on this rank, S sequences of the row or the row as a whole, E experts, K experts per
token, L layers of the whole model, or those with experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mrl.algo.balance import LOSS_NAMES, Routing, bias_directions
from mrl.algo.losses import BatchSize
from mrl.data.packing import PackedRow
from mrl.gpus import on_gpu
from mrl.policy import specs
from mrl.policy.batch import computed_positions, of_routers
from mrl.policy.versions import IS_OLD, flex_arguments, submodules_of

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


def routing_arguments(config: MegatronConfig, *, has_experts: bool) -> dict[str, object]:
    """The routing arguments of Megatron's TransformerConfig that are not the model's."""
    if not has_experts:
        # Set even where unused, because Megatron checks its default.
        return dict(moe_token_dispatcher_type="alltoall")
    return dict(
        moe_router_dtype=config.moe_router_dtype,
        moe_router_load_balancing_type=config.moe_router_load_balancing_type,
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_router_bias_update_rate=0.0,
        # Megatron refuses its allgather dispatcher for rows that differ in length; `use_row_dispatchers` puts ours in.
        moe_token_dispatcher_type="alltoall"
        if config.moe_token_dispatcher_type == "allgather"
        else config.moe_token_dispatcher_type,
        moe_enable_deepep=config.moe_enable_deepep,
        **flex_arguments(config),
        moe_grouped_gemm=specs.HAVE_TE,
        moe_shared_expert_overlap=config.moe_shared_expert_overlap and on_gpu(),
    )


Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)

Choice = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]
"""Megatron's choice of experts: scores [T, E], experts per token, groups, chosen groups -> scores and ids,
both [T, K].
"""


def with_packed_routers(spec: Spec) -> Spec:
    """The spec of a hybrid stack, or of a block of transformer layers, with `PackedRouter` in its layers of experts."""
    layers = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec.submodules.moe_layer]
    for layer in layers:
        parts = submodules_of(layer.submodules.mlp)
        if isinstance(parts, MoESubmodules):
            parts.router = PackedRouter
    return spec


def use_row_dispatchers(model: nn.Module, config: MegatronConfig) -> None:
    """Gives every layer of experts a `RowAllGatherDispatcher`, if the config asks for the allgather dispatcher."""
    if config.moe_token_dispatcher_type != "allgather":
        return
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = RowAllGatherDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


@dataclass(frozen=True)
class RowTokens:
    """Token facts of a row of a global batch for this rank's routers."""

    sequences_T: Tensor
    """int64, index of each token's sequence in the row; `num_sequences` for padding."""
    num_sequences: int
    batch: BatchSize
    sources_T: Tensor | None = None
    """int64, which of the tokens that the routers see each of these is; None: they see each once. A token that
    sequences share counts in each of them.
    """

    def spread(self, values: Tensor) -> Tensor:
        """Values of the tokens of the row from those of the tokens that the routers see; gradients add up."""
        # Indexing, not index_select: its backward pass is deterministic on GPUs.
        return values if self.sources_T is None else values[self.sources_T]


def row_tokens(row: PackedRow, batch: BatchSize, device: torch.device) -> RowTokens:
    sequences_T = torch.full_like(row.token_ids_T, len(row.lengths))
    for index, (start, length) in enumerate(zip(row.cu_seqlens.tolist(), row.lengths, strict=False)):
        sequences_T[start : start + length] = index
    if row.tree is None:
        return RowTokens(of_routers(sequences_T[computed_positions(row)]).to(device), len(row.lengths), batch)
    seen_U = of_routers(torch.arange(len(row.tree.positions_U)))
    is_seen_T = (row.tree.tokens_T >= seen_U[0]) & (row.tree.tokens_T <= seen_U[-1]) & (sequences_T < len(row.lengths))
    sources_T = row.tree.tokens_T[is_seen_T] - seen_U[0]
    return RowTokens(sequences_T[is_seen_T].to(device), len(row.lengths), batch, sources_T.to(device))


def show_row(chunk: nn.Module, tokens: RowTokens) -> None:
    """Tells the chunk's routers which row they compute next, in a forward pass or in a recomputation."""
    for router in _routers([chunk]):
        router.row = tokens


def expect_passes(block: nn.Module, passes_per_row: int) -> None:
    """Tells the routers of a block of layers how many times a step passes each row through it."""
    for router in _routers([block]):
        router.passes_per_row = passes_per_row


def _routers(chunks: Sequence[nn.Module]) -> Iterator[PackedRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, PackedRouter))


def best_first(
    scores_TE: Tensor, topk: int, num_groups: int | None, group_topk: int | None, own_choice: Choice
) -> tuple[Tensor, Tensor]:
    """Scores and ids of the experts that Megatron chooses for each token, both [T, K].

    From 0.17 on Megatron orders them in passes with gradient only, and a sum of scores rounds by their order.
    """
    scores_TK, ids_TK = own_choice(scores_TE, topk, num_groups, group_topk)
    scores_TK, order_TK = scores_TK.sort(dim=1, descending=True, stable=True)
    return scores_TK, ids_TK.gather(1, order_TK)


class PackedRouter(TopKRouter):
    """Megatron's router that counts each expert's tokens and takes auxiliary losses over sequences, rows or the batch.

    Counts only passes with gradient, and of a recomputed layer only the recomputation: neither logprob passes nor
    padding move a bias. With f an expert's share of the choices and P its mean score, a loss is E * sum(f * P):

        seq_aux_loss     of each sequence; the mean over the sequences of the global batch (DeepSeek-V3,
        arXiv:2412.19437) aux_loss         of each packed row; the mean over rows, weighted by their tokens (Switch,
        arXiv:2101.03961) global_aux_loss  f of all rows so far of all data-parallel ranks (arXiv:2501.11873), P of the
        global batch
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **place: bool
    ) -> None:
        super().__init__(config, pg_collection, **place)
        if not IS_OLD:
            self.router_replay = SimpleNamespace(get_replay_topk=best_first)
        self.row: RowTokens | None = None
        self.passes_per_row = 1
        """Passes of each row through the router in a step; the auxiliary losses are the means over these passes."""
        self.reset()

    @property
    def layer_index(self) -> int:
        """Index of the router's layer in the whole model, from 0."""
        assert self.layer_number is not None
        return self.layer_number - 1

    def reset(self) -> None:
        self.tokens_E: Tensor | int = 0
        """Choices of each expert by this rank's tokens, int64."""
        self.losses: dict[str, Tensor] = {}
        self.batch_tokens_SE: Tensor | int = 0
        """Choices by the tokens of all ranks so far, for the loss over the batch."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Megatron's own counts stay zero, so that its update of the biases moves nothing.
        if self.row is not None and torch.is_grad_enabled():
            is_token_T = self.row.sequences_T < self.row.num_sequences
            self.tokens_E = self.tokens_E + (self.row.spread(routing_map) & is_token_T[:, None]).sum(dim=0)

    def _with_loss(
        self, kind: str, probs: Tensor, scores_TE: Tensor, is_chosen_TE: Tensor, *_: object, **__: object
    ) -> Tensor:
        """`probs`, whose backward pass adds the gradient of this rank's loss: they are summed over ranks and rows."""
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        row = self.row
        assert row is not None, "show_row comes before the forward pass"
        scores_TE, is_chosen_TE = row.spread(scores_TE), row.spread(is_chosen_TE)
        per_sequence = kind == "seq_aux_loss"
        parts = row.num_sequences if per_sequence else 1
        part_T = row.sequences_T if per_sequence else (row.sequences_T == row.num_sequences).long()
        tokens_SE = is_chosen_TE.new_zeros(parts + 1, scores_TE.shape[1], dtype=torch.int64)
        tokens_SE = tokens_SE.index_add_(0, part_T, is_chosen_TE.long())
        dist.all_reduce(tokens_SE, group=self.tp_dp_cp_group if kind == "global_aux_loss" else self.tp_cp_group)
        tokens_SE = tokens_SE[:parts]
        if kind == "global_aux_loss":
            self.batch_tokens_SE = tokens_SE = self.batch_tokens_SE + tokens_SE
        choices_S1 = tokens_SE.sum(dim=1, keepdim=True).clamp(min=1)
        weights_SE = tokens_SE.double() / choices_S1 * tokens_SE.shape[1]
        weights_SE = weights_SE / (
            choices_S1 / self.topk * row.batch.num_sequences if per_sequence else row.batch.num_tokens
        )
        # A weight per token and expert instead of sums of scores per part: its backward pass is deterministic on GPUs,
        # too.
        loss = (F.pad(weights_SE, (0, 0, 0, 1)).to(scores_TE.dtype)[part_T] * scores_TE).sum() / self.passes_per_row
        self.losses[kind] = (
            self.losses.get(kind, torch.zeros((), dtype=torch.double, device=loss.device)) + loss.detach().double()
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient)

    _apply_aux_loss = partialmethod(_with_loss, "aux_loss")
    _apply_seq_aux_loss = partialmethod(_with_loss, "seq_aux_loss")
    _apply_global_aux_loss = partialmethod(_with_loss, "global_aux_loss")


class RowAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's allgather dispatcher for ranks whose rows differ in length: pads them with tokens sent to no expert.

    Both methods are collective over the tp-ep group.
    """

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.num_tokens = hidden_states.shape[0]
        longest = torch.tensor(self.num_tokens, device=hidden_states.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        filling = (0, 0, 0, int(longest) - self.num_tokens)
        self.routing_map = F.pad(self.routing_map, filling)
        return super().token_dispatch(F.pad(hidden_states, filling), F.pad(probs, filling))

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return super().token_combine(hidden_states)[: self.num_tokens]


def take_routing(chunks: Sequence[DistributedDataParallel], *, loss_type: str) -> Routing:
    """The counts of all routers since the last call. `loss_type` is the policy's moe_router_load_balancing_type.

    Collective over all ranks where the model has experts. Experts train with sequence parallelism, so one rank counts
    each token.
    """
    config, device = chunks[0].config, next(chunks[0].parameters()).device
    num_layers = getattr(config, "num_layers_with_mtp", config.num_layers)
    tokens_LE = torch.zeros(num_layers, config.num_moe_experts or 0, dtype=torch.int64, device=device)
    if config.num_moe_experts is None:
        return Routing(tokens_LE.cpu(), {})
    losses = {
        kind: torch.zeros(num_layers, dtype=torch.double, device=device) for kind in LOSS_NAMES if kind == loss_type
    }
    for router in _routers(chunks):
        tokens_LE[router.layer_index] = router.tokens_E
        for kind, loss in router.losses.items():
            losses[kind][router.layer_index] = loss
        router.reset()
    for total in (tokens_LE, *losses.values()):
        dist.all_reduce(total)
    return Routing(tokens_LE.cpu(), {kind: loss.cpu() for kind, loss in losses.items()})


@torch.no_grad()
def update_expert_biases(chunks: Sequence[DistributedDataParallel], routing: Routing, *, rate: float) -> None:
    """Moves the bias of every expert by `rate`, up where tokens are missing and down where there are too many."""
    if rate == 0:
        return
    directions_LE = bias_directions(routing.tokens_LE)
    for router in _routers(chunks):
        router.expert_bias.add_(directions_LE[router.layer_index].to(router.expert_bias), alpha=rate)


class RouterReplay:
    """Router replay (R3, arXiv:2510.11370): the policy's routers send each token to the experts that the engine chose.

    The probabilities are the policy's own scores of those experts, so gradients flow through the gate; the balancing
    bias has no effect, because it only changes choices. Statistics count the experts that tokens were really sent to.
    Auxiliary losses rate the scores against the router's own choice, as in Megatron.

    Megatron calls a router's `router_replay` instead of choosing. We do not use Megatron's own RouterReplay: global
    switches tell it whether a call belongs to a forward pass or to a recomputation, which takes its routes from a
    queue. Under 1F1B both kinds alternate, and passes without recomputation leave the queue full.

    A rank computes one microbatch at a time: forward, backward, or recomputed. `enter` sets it at the start of the
    forward pass. The gradient of its output, which backward computes first, sets it again, so recomputation follows the
    same routes in any schedule.
    """

    def __init__(self, chunks: Sequence[MegatronModule], expert_layers: Sequence[int]) -> None:
        """`expert_layers` are the indices of the layers with experts in the whole model, in the order of routes."""
        self._num_layers = len(expert_layers)
        self._layers: list[int] = []
        self._current: tuple[Tensor, Tensor, Tensor] | None = None
        """Routes of the microbatch for this rank's tokens and layers: expert ids [L, T, K], a mask [T] of tokens with
        routes, and how many of the row's tokens with routes each is.
        """
        self._is_counting = False
        for chunk in unwrap_model(list(chunks)):
            for layer in chunk.decoder.layers:
                for router in (module for module in layer.modules() if isinstance(module, TopKRouter)):
                    router.router_replay = SimpleNamespace(get_replay_topk=partial(self._choose, len(self._layers)))
                    self._layers.append(expert_layers.index(layer.layer_number - 1))
        self._num_experts, self._topk = chunks[0].config.num_moe_experts, chunks[0].config.moe_router_topk
        self._counts_L2 = torch.zeros(
            len(self._layers), 2, dtype=torch.int64, device=next(chunks[0].parameters()).device
        )

    def check(self, rows: Sequence[PackedRow]) -> None:
        """Checks that every row with tokens to train on has routes of this model."""
        for row in rows:
            if not row.sequence_indices or (row.routes is None and not row.num_valid_tokens):
                continue
            if row.routes is None:
                raise ValueError(
                    "policy.router_replay.enabled=true, but rollouts came without routes; their engine was started "
                    "without it"
                )
            shape = tuple(row.routes.expert_ids_TLK.shape[1:])
            if shape != (self._num_layers, self._topk) or int(row.routes.expert_ids_TLK.max()) >= self._num_experts:
                raise ValueError(
                    f"routes of {shape} (layers, experts per token) with ids up to "
                    f"{int(row.routes.expert_ids_TLK.max())} are not those of this model: "
                    f"{(self._num_layers, self._topk)}, {self._num_experts} experts"
                )

    def enter(self, row: PackedRow) -> None:
        """Starts the microbatch of this row; without routes its routers choose by themselves."""
        if row.routes is None:
            self._current = None
            return
        positions_T = of_routers(computed_positions(row))
        expert_ids_LTK = row.routes.expert_ids_TLK[positions_T][:, self._layers].transpose(0, 1).contiguous()
        device = self._counts_L2.device
        is_known_T = row.routes.is_known_T[positions_T]
        # A token that sequences share counts in each of them.
        counts_T = is_known_T.long() if row.tree is None else is_known_T * of_routers(row.tree.counts_U)
        self._current = expert_ids_LTK.to(device), is_known_T.to(device), counts_T.to(device)

    def enter_again_in_backward(self, output: Tensor) -> None:
        """Makes the backward pass of `output`, the current microbatch's result, enter that microbatch once more."""
        if not output.requires_grad:
            return
        routes = self._current

        def enter(grad: Tensor) -> None:
            self._current = routes

        output.register_hook(enter)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts in forward passes in the `with` block how often routers would choose other experts than the routes."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def take_metrics(self) -> dict[str, float]:
        """Share of (token, layer) pairs where the router's own choice was another set of experts, since the last call.

        Earlier layers follow their routes. Collective over all ranks; the same floats on every rank.
        """
        counts = torch.zeros(self._num_layers, 2, dtype=torch.int64)
        counts[self._layers] = self._counts_L2.cpu()
        self._counts_L2.zero_()
        # Ranks that route the same tokens count them alike.
        dist.all_reduce(counts)
        shares = counts[:, 0] / counts[:, 1].clamp(min=1)
        total = counts.sum(dim=0)
        return {
            "router_mismatch": float(total[0] / total[1].clamp(min=1)),
            "router_mismatch_worst_layer": float(shares.max()),
        }

    def _choose(
        self,
        index: int,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_choice: Choice,
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of each token's experts in this rank's `index`-th expert layer, both [T, K], best first."""
        own_scores_TK, own_ids_TK = best_first(scores_TE, topk, num_groups, group_topk, own_choice)
        if self._current is None:
            return own_scores_TK, own_ids_TK
        expert_ids_LTK, is_known_T, counts_T = self._current
        known_T1 = is_known_T[:, None]
        ids_TK = torch.where(known_T1, expert_ids_LTK[index].long(), own_ids_TK)
        if self._is_counting:
            differs_T = (ids_TK.sort(dim=1).values != own_ids_TK.sort(dim=1).values).any(dim=1)
            self._counts_L2[index] += torch.stack([(differs_T * counts_T).sum(), counts_T.sum()])
        # In topk's order, so that the same choice gives the same sums, whatever the engine's order.
        scores_TK, order_TK = scores_TE.gather(1, ids_TK).sort(dim=1, descending=True, stable=True)
        return scores_TK, ids_TK.gather(1, order_TK)
