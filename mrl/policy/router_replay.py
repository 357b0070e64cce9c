"""Router replay (R3, arXiv:2510.11370): the policy's routers send each token to the experts that the engine chose for it.

The probabilities are the policy's own scores of those experts, so gradients flow through the gate as ever; a bias that balances experts
only takes part in a choice, and there is none. Its statistics count the experts that a token was really sent to. Auxiliary losses rate
the scores against the router's own choice, as Megatron computes them.

Megatron calls the `router_replay` of a router where it would choose. Its own RouterReplay is not used: it learns from global switches
whether a call belongs to a forward pass or to one that is computed again in backward, and takes the routes of the latter from a queue.
Under 1F1B both kinds alternate, and passes that compute nothing again leave the queue full.

Shape suffixes: T tokens of this rank, L layers with experts on this rank, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.data.packing import PackedRow
from mrl.policy.batch import router_positions


class RouterReplay:
    """The routes that all routers of this rank follow, and how often they would have chosen otherwise.

    At any time a rank computes one microbatch: in forward, in backward, or again in backward. `enter` says which one at the start of its
    forward pass, and the gradient of its output, the first thing that its backward pass computes, says so again: whatever is computed anew
    from there on follows the same routes, in any schedule.
    """

    def __init__(self, chunks: Sequence[MegatronModule], expert_layers: Sequence[int]) -> None:
        """`expert_layers` are the indices of the layers with experts in the whole model, in the order in which routes list them."""
        self._num_layers = len(expert_layers)
        self._layers: list[int] = []
        self._current: tuple[Tensor, Tensor] | None = None
        """Routes of the microbatch, for this rank's tokens and layers: expert ids [L, T, K], and which tokens have any, [T]."""
        self._is_counting = False
        for chunk in unwrap_model(list(chunks)):
            for layer in chunk.decoder.layers:
                for router in (module for module in layer.modules() if isinstance(module, TopKRouter)):
                    router.router_replay = _Follower(self, len(self._layers))
                    self._layers.append(expert_layers.index(layer.layer_number - 1))
        self._num_experts, self._topk = chunks[0].config.num_moe_experts, chunks[0].config.moe_router_topk
        self._counts_L2 = torch.zeros(len(self._layers), 2, dtype=torch.int64, device=next(chunks[0].parameters()).device)

    def check(self, rows: Sequence[PackedRow]) -> None:
        """Checks that every row with sequences has routes of this model.

        Raises:
            ValueError: a row has none, or those of another model.
        """
        for row in rows:
            if not row.sequence_indices:
                continue
            if row.routes is None:
                raise ValueError("policy.router_replay.enabled=true, but rollouts came without routes; their engine was started without it")
            shape = tuple(row.routes.expert_ids_TLK.shape[1:])
            if shape != (self._num_layers, self._topk) or int(row.routes.expert_ids_TLK.max()) >= self._num_experts:
                raise ValueError(
                    f"routes of {shape} (layers, experts per token) with ids up to {int(row.routes.expert_ids_TLK.max())} are not those of "
                    f"this model: {(self._num_layers, self._topk)}, {self._num_experts} experts"
                )

    def enter(self, row: PackedRow) -> None:
        """Starts the microbatch of this row; its routers choose by themselves if it has no routes."""
        if row.routes is None:
            self._current = None
            return
        positions_T = router_positions(row)
        expert_ids_LTK = row.routes.expert_ids_TLK[positions_T][:, self._layers].transpose(0, 1).contiguous()
        device = self._counts_L2.device
        self._current = expert_ids_LTK.to(device), row.routes.is_known_T[positions_T].to(device)

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
        """Inside, forward passes count how often routers would have chosen other experts than their routes."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def take_metrics(self) -> dict[str, float]:
        """Share of (token, layer) pairs for which the router's own choice was another set of experts, since the last call.

        A router chooses after the layers before it have followed. Collective over all ranks; the same floats on every rank.
        """
        counts = torch.zeros(self._num_layers, 2, dtype=torch.int64)
        counts[self._layers] = self._counts_L2.cpu()
        self._counts_L2.zero_()
        # Ranks that route the same tokens count them alike.
        dist.all_reduce(counts)
        shares = counts[:, 0] / counts[:, 1].clamp(min=1)
        total = counts.sum(dim=0)
        return {"router_mismatch": float(total[0] / total[1].clamp(min=1)), "router_mismatch_worst_layer": float(shares.max())}

    def choose(self, index: int, scores_TE: Tensor, own_scores_TK: Tensor, own_ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and ids of the experts of each token in this rank's `index`-th layer with experts, both [T, K], best first."""
        if self._current is None:
            return own_scores_TK, own_ids_TK
        expert_ids_LTK, is_known_T = self._current
        known_T1 = is_known_T[:, None]
        ids_TK = torch.where(known_T1, expert_ids_LTK[index].long(), own_ids_TK)
        if self._is_counting:
            differs_T = (ids_TK.sort(dim=1).values != own_ids_TK.sort(dim=1).values).any(dim=1)
            self._counts_L2[index] += torch.stack([differs_T.sum(), known_T1.sum()])
        # In the order of topk, so that the same choice gives the same sums, whatever order the engine keeps.
        scores_TK, order_TK = scores_TE.gather(1, ids_TK).sort(dim=1, descending=True, stable=True)
        return scores_TK, ids_TK.gather(1, order_TK)


class _Follower:
    """One router's link to the replay; Megatron asks it where the router would choose."""

    def __init__(self, replay: RouterReplay, index: int) -> None:
        self._replay = replay
        self._index = index

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """As megatron.core.transformer.moe.router_replay.RouterReplay has it; `scores` with the bias, where there is one."""
        return self._replay.choose(self._index, scores, *default_compute_topk(scores, topk, num_groups, group_topk))
