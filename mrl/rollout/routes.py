"""Which experts vLLM sent each token of a request through, for a worker whose model runner cannot tell.

On GPUs vLLM's second model runner does this itself (`enable_return_routed_experts`): it keeps the routes of cached blocks, follows
preemption, and captures into memory that CUDA graphs can write. It needs Triton. The first model runner, which CPU hosts have, gets vLLM's
capturer at its routers here, and its batches say whose rows are whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RouteRecorder:
    """Routes of the running requests, by vLLM's id. Prefix caching must be off: the routes of a cached prefix would be missing."""

    def __init__(self, runner: GPUModelRunner, layers: Sequence[int]) -> None:
        """From here on records every forward pass; `layers` are the indices of the layers with experts.

        On every worker of an engine, because capturing may be collective. All workers see the same routes, and the first keeps them.
        """
        self._runner = runner
        self._layers = list(layers)
        self._passes: dict[str, list[tuple[int, np.ndarray]]] = {}
        config = runner.vllm_config
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.get_model(), self._capturer)
        if not get_tp_group().is_first_rank:
            return
        forward = runner._model_forward

        def recorded(*arguments: object, **named: object) -> object:
            output = forward(*arguments, **named)  # type: ignore[arg-type]  # passed through
            self._record()
            return output

        setattr(runner, "_model_forward", recorded)  # noqa: B010  (a method is replaced)

    def take(self, request_ids: Sequence[str]) -> list[np.ndarray]:
        """Routes of these requests, each [tokens that went through the model, layers, experts per token], and forgets them.

        Raises:
            RuntimeError: some token never went through the model.
        """
        return [_joined(request_id, self._passes.pop(request_id)) for request_id in request_ids]

    def _record(self) -> None:
        batch = self._runner.input_batch
        # Requests that were aborted, or that finished without being asked for, are gone from the runner.
        self._passes = {key: passes for key, passes in self._passes.items() if key in self._runner.requests}
        bounds = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        routes = self._capturer.snapshot_routing_data(bounds[-1]).numpy()[:, self._layers]
        first_positions = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        for request_id, position, start, stop in zip(batch.req_ids, first_positions, bounds[:-1], bounds[1:], strict=True):
            self._passes.setdefault(request_id, []).append((position, routes[start:stop]))


def _joined(request_id: str, passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """The routes of a request from its forward passes; where it was preempted and computed again, the last one counts."""
    length = max(position + len(routes) for position, routes in passes)
    joined = np.zeros((length, *passes[0][1].shape[1:]), dtype=passes[0][1].dtype)
    is_seen = np.zeros(length, dtype=np.bool_)
    for position, routes in passes:
        joined[position : position + len(routes)] = routes
        is_seen[position : position + len(routes)] = True
    if not is_seen.all():
        raise RuntimeError(
            f"request {request_id}: {int((~is_seen).sum())} of {length} tokens never went through the model: a cached prefix?"
        )
    return joined
