# SPDX-License-Identifier: Apache-2.0
"""Code inside vLLM's worker processes: the live model by slot, the engine side of a refit, also of layers that vLLM
quantises as it loads them, and routes on CPU hosts.

vLLM imports this module in every worker before it builds the model, so a CPU host gets its patches of vLLM here.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conversion.boxes import Slot
from conversion.families.common import DRAFTER, EngineDtypes
from mrl import numa
from mrl.refit import RefitError, Refused
from mrl.refit.checksum import digest
from mrl.refit.exchange import Exchange
from mrl.refit.group import ExchangeGroup
from mrl.refit.inputs import ExchangeMember, Part, WorkerRefit
from mrl.refit.pull import Puller, VerifyReport
from mrl.refit.staging import Quantiser
from mrl.rollout.held_adapters import adapter_tensors, hold_adapter, weight_name
from mrl.spans import memory_facts, process_key

_ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
_KERNELS = {"fp8_linear", "kernel"}
"""Attributes of vLLM's methods that hold the kernel of a linear layer, which packs weights."""
_AFTER_THE_RECORD = "bias"
"""Parameter that vLLM's linear layers get after it has recorded what they load."""
_DONE = "_already_called_process_weights_after_loading"


def quantisers(models: Sequence[nn.Module]) -> list[Quantiser]:
    """The layers that vLLM has quantised online, in the order in which it built them."""
    if _ONLINE not in sys.modules:
        return []  # vLLM imports it with the first such layer; it asks for kernels that not every build has
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    return [
        _quantiser(prefix, layer, names)
        for model in models
        for names in [dict(model.named_parameters())]
        for prefix, layer in model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), (OnlineLinearBase, OnlineMoEMethodBase))
    ]


def _quantiser(prefix: str, layer: nn.Module, names: Mapping[str, object]) -> Quantiser:
    live = dict(layer.named_parameters(recurse=False))
    # As vLLM recorded them before it read a file.
    as_loaded = get_layerwise_info(layer).restore_metadata[0]
    loaded = {name: tensor for name, tensor in as_loaded.items() if live[name].dtype != tensor.dtype}
    # A parameter that it shares has its name elsewhere; a bias is loaded as it is.
    own = [
        name
        for name in live
        if f"{prefix}.{name}" in names and (name in loaded or name not in (*as_loaded, _AFTER_THE_RECORD))
    ]
    made = [Slot(f"{prefix}.{name}") for name in own]

    def make(weights: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        given = {name: weights[Slot(f"{prefix}.{name}")] for name in loaded}
        kept = {name: live[name] for name in live if name not in own}
        parameters = processed(layer, given, kept)
        return {Slot(f"{prefix}.{name}"): parameters[name] for name in own}

    return Quantiser({Slot(f"{prefix}.{name}"): tensor for name, tensor in loaded.items()}, made, make)


def processed(layer: nn.Module, weights: Mapping[str, Tensor], kept: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Parameters that vLLM makes of a layer's weights: quantised, and laid out for its kernel.

    A shadow of the layer goes through vLLM's own processing, which changes its kernel, too. The layer, whose addresses
    CUDA graphs hold, stays as it is.
    """
    shadow, method = copy.copy(layer), copy.copy(layer.quant_method)
    own = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights.items()}
    vars(shadow).update(_parameters={**kept, **own}, _buffers=dict(layer._buffers), _modules=dict(layer._modules))
    vars(shadow).pop(_DONE, None)
    vars(shadow)["quant_method"] = method
    for name in _KERNELS & vars(method).keys():
        vars(method)[name] = copy.copy(vars(method)[name])
    process: Callable[[nn.Module], None] = getattr(method, "process_weights_after_loading")  # noqa: B009  (of vLLM's methods)
    process(shadow)
    return {name: parameter.data for name, parameter in shadow.named_parameters(recurse=False)}


if current_platform.is_cpu():
    from mrl.rollout import cpu

    cpu.install()

# Scales of a quantised KV cache. Attention registers them always; they stay 1 where the cache is not quantised, and no
# checkpoint has them.
CONSTANT_BUFFERS = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


class RefitWorker:
    """Methods that vLLM adds to its worker class; `Engine` calls them by name on all workers."""

    # vLLM's worker has these; a definition here would be refused as a conflict.
    rank: int
    local_rank: int
    get_model: Callable[[], nn.Module]
    get_draft_model: Callable[[], nn.Module | None]
    model_runner: GPUModelRunner

    recorder: RouteRecorder | None = None
    # By part of what a refit moves; `hold_adapter` makes the second.
    sides: dict[Part, _Side] | None = None

    def live_digest(self) -> dict[Slot, int]:
        return digest(self._tensors())

    def hold_adapter(self) -> None:
        """Makes room for the adapter of all requests, which a refit fills."""
        hold_adapter(self.model_runner)

    def tensor_dtypes(self, part: Part) -> EngineDtypes:
        """Names and dtypes of the tensors that a refit brings.

        These are the live ones, but of a quantised layer the weights of which vLLM makes them. vLLM chooses some dtypes
        by GPU capability: nemotron_h gates are bfloat16 on 9.0.
        """
        tensors = dict(self._tensors_of(part))
        for quantiser in quantisers(self._models()):
            tensors = {slot: tensor for slot, tensor in tensors.items() if slot not in quantiser.made}
            tensors |= quantiser.loaded
        return tuple((slot.name, str(tensor.dtype).removeprefix("torch.")) for slot, tensor in tensors.items())

    def bind_to_gpu(self, device_ids: Sequence[int]) -> str:
        """Binds this worker to the NUMA node of its GPU, of those of the engine on this node."""
        return numa.bind(numa.gpu_nodes([device_ids[self.local_rank]]))

    def memory_facts(self) -> tuple[str, dict[str, int]]:
        """Memory that this process holds, with its process id."""
        return process_key(), memory_facts()

    def prepare_refit(self, workers: Sequence[WorkerRefit]) -> None:
        """Computes the schedule, maps its trainer rank's memory or joins the exchange collectively, prepares copies."""
        mine = workers[self.rank]
        part = mine.inputs.part
        tensors, side = self._tensors_of(part), self._sides().setdefault(part, _Side())
        # Gives back what an earlier refit has mapped or received into.
        if side.exchange is not None:
            side.exchange.join(None)
        side.puller = side.exchange = None
        for name, buffer in (pair for model in self._models() for pair in model.named_buffers()):
            if _is_constant(name) and buffer.item() != 1.0:
                raise RefitError(f"{name} is {buffer.item()}, but a refit knows no quantised KV cache")
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, slot) for slot, tensor in tensors.items())
        for (_, end, slot), (start, _, following) in zip(spans, spans[1:], strict=False):
            if start < end:
                raise RefitError(f"{slot} and {following} share memory in the engine")
        schedule, handles = mine.inputs.schedule(), mine.memory
        if isinstance(handles, ExchangeMember):
            device = next(iter(tensors.values())).device
            group = ExchangeGroup(handles.address, mine.worker, device=device, timeout_s=handles.timeout_s)
            # Without a trainer rank on its GPU it receives, and sends nothing.
            side.exchange = Exchange(schedule, mine.worker, {}, None, group=group)
            handles = side.exchange.handles()
        side.puller = Puller(
            partial(self._tensors_of, part),
            schedule,
            mine.worker,
            handles,
            own=side.exchange,
            addresses=side.addresses,
            quantisers=quantisers(self._models()) if part == "weights" else (),
            peers=[worker.worker for worker in workers],
        )
        side.addresses = side.puller.addresses

    def wait_for_room(self, attempt: int, timeout_s: float, part: Part) -> Refused | None:
        """Waits until this worker's weights have room next to the policy's; errors as in `run_refit`."""
        try:
            self._prepared(part).wait_for_room(attempt, timeout_s=timeout_s)
        except RefitError as error:
            return Refused(error)
        return None

    def run_refit(self, attempt: int, is_reader: bool, timeout_s: float, part: Part) -> VerifyReport | Refused | None:
        """The whole refit's report, None if this worker only takes part in the exchange; or why it left the attempt.

        An error is handed over: when one worker raises it, vLLM leaves the answers of the others for the next call.

        A refit writes parameters in the layout in which vLLM loads them; those that vLLM quantises it makes of staged
        weights by vLLM's own code (`processed`). The engine's arguments and `cpu.install` choose only kernels that read
        them so; refit zero and the witness tests fail for one that keeps a copy of its own, such as repacked for a CPU
        or reordered for FlashInfer. Such a kernel would rebuild its copy here, after all bytes have been verified and
        before the first token.
        """
        try:
            if is_reader:
                puller = self._prepared(part)
                puller.run(attempt, timeout_s=timeout_s)
                return puller.finish()
            exchange = self._sides()[part].exchange
            assert exchange is not None, "colocated workers only read"
            exchange.run(attempt, [], timeout_s=timeout_s)
        except RefitError as error:
            return Refused(error)
        return None

    def limit_vocabulary(self, num_tokens: int) -> None:
        """Forbids tokens from this id on: the embedding has more rows than the tokenizer has tokens."""
        config = self.model_runner.vllm_config
        if num_tokens >= config.model_config.get_vocab_size():
            return
        if config.parallel_config.enable_batch_sharded_sampling:
            raise ValueError(
                "vllm_kwargs.enable_batch_sharded_sampling=true draws padding of the embedding, too; leave it out"
            )
        model = self.get_model()
        compute: Callable[..., Tensor | None] = getattr(model, "compute_logits")  # noqa: B009  (of vLLM's models, not of nn.Module)

        def limited(*arguments: object, **named: object) -> Tensor | None:
            logits = compute(*arguments, **named)
            if logits is not None:
                logits[..., num_tokens:] = float("-inf")
            return logits

        setattr(model, "compute_logits", limited)  # noqa: B010  (a method is replaced)

    def record_routes(self, layers: Sequence[int]) -> None:
        self.recorder = RouteRecorder(self.model_runner, layers)

    def take_routes(self, request_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """The routes of finished requests, by id; those of each are known to the first worker of its group."""
        assert self.recorder is not None, "record_routes comes first"
        return self.recorder.take(request_ids)

    def _models(self) -> list[nn.Module]:
        """The model, and the drafter that proposes tokens, if that is a model."""
        drafter = self.get_draft_model()
        return [self.get_model(), *([] if drafter is None else [drafter])]

    def _tensors(self) -> dict[Slot, Tensor]:
        return engine_tensors(*self._models())

    def _tensors_of(self, part: Part) -> dict[Slot, Tensor]:
        return self._tensors() if part == "weights" else adapter_tensors(self.get_model())

    def _sides(self) -> dict[Part, _Side]:
        if self.sides is None:
            self.sides = {}
        return self.sides

    def _prepared(self, part: Part) -> Puller:
        puller = self._sides()[part].puller
        assert puller is not None, "pull before prepare_refit"
        return puller


@dataclass
class _Side:
    """This worker's side of the refits of one part."""

    puller: Puller | None = None
    exchange: Exchange | None = None
    addresses: Mapping[Slot, int] | None = None
    """Addresses of the live tensors at the first preparation of a refit: CUDA graphs read there."""


class RouteRecorder:
    """Records which experts vLLM sends each token of the running requests through. Prefix caching must be off.

    CPU hosts only. On GPUs vLLM's second model runner does this itself (`enable_return_routed_experts`): it keeps the
    routes of cached blocks, follows preemption, and captures into memory that CUDA graphs can write. It needs Triton.
    The first model runner, which CPU hosts have, gets vLLM's capturer at its routers here, and its batches say whose
    rows are whose.
    """

    def __init__(self, runner: GPUModelRunner, layers: Sequence[int]) -> None:
        """Starts recording these layers on every worker, as capturing may be collective; the first keeps the routes."""
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

    def take(self, request_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Routes of those of these requests that ran here, [tokens that ran, layers, experts], and forgets them."""
        mine = [request_id for request_id in request_ids if request_id in self._passes]
        return {request_id: _joined(request_id, self._passes.pop(request_id)) for request_id in mine}

    def _record(self) -> None:
        batch = self._runner.input_batch
        # Requests that were aborted, or that finished without being asked for, are gone from the runner.
        alive = self._runner.requests
        # Answers to one request (`0_ID`, `1_ID`) are asked for together, once the last has finished.
        together = {tail for key in alive if (tail := key.partition("_")[2])}
        self._passes = {
            key: passes for key, passes in self._passes.items() if key in alive or key.partition("_")[2] in together
        }
        bounds = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        routes = self._capturer.snapshot_routing_data(bounds[-1]).numpy()[:, self._layers]
        first_positions = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        for request_id, position, start, stop in zip(
            batch.req_ids, first_positions, bounds[:-1], bounds[1:], strict=True
        ):
            self._passes.setdefault(request_id, []).append((position, routes[start:stop]))


def _joined(request_id: str, passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """The routes of a request from its forward passes.

    Of a place that several of them computed the last one counts: after a preemption, and after a proposal that was
    rejected.
    """
    length = max(position + len(routes) for position, routes in passes)
    joined = np.zeros((length, *passes[0][1].shape[1:]), dtype=passes[0][1].dtype)
    is_seen = np.zeros(length, dtype=np.bool_)
    for position, routes in passes:
        joined[position : position + len(routes)] = routes
        is_seen[position : position + len(routes)] = True
    if not is_seen.all():
        raise RuntimeError(
            f"request {request_id}: {int((~is_seen).sum())} of {length} tokens never went through the model: a "
            "cached prefix?"
        )
    return joined


def engine_tensors(model: nn.Module, drafter: nn.Module | None = None) -> dict[Slot, Tensor]:
    """All that a forward pass reads and training may change: parameters and persistent buffers, each storage once.

    A tied parameter counts under its first name. Views of a parameter (`conv_weights` of a Mamba mixer, both halves of
    `kv_b_proj` for latent attention) follow it. The embedding and output layer that a drafter shares count as the
    model's.
    """
    tensors = _named_tensors(model)
    if drafter is not None:
        shared = {tensor.data_ptr() for tensor in tensors.values()}
        tensors |= {
            f"{DRAFTER}{name}": tensor
            for name, tensor in _named_tensors(drafter).items()
            if tensor.data_ptr() not in shared
        }
    return {Slot(weight_name(name)): tensor for name, tensor in tensors.items()}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    persistent = model.state_dict(keep_vars=True).keys()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    whole = {_storage(tensor) for tensor in parameters.values() if _is_whole(tensor)}
    tensors = parameters.items()
    return {name: tensor for name, tensor in tensors if _is_whole(tensor) or _storage(tensor) not in whole} | {
        name: buffer for name, buffer in model.named_buffers() if name in persistent and not _is_constant(name)
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_constant(name: str) -> bool:
    return name.rpartition(".")[2] in CONSTANT_BUFFERS
