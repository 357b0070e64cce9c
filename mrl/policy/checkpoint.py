# SPDX-License-Identifier: Apache-2.0
"""Megatron torch_dist checkpoints: weights, optimizer, schedule, random states of all ranks, loadable at any layout."""

from __future__ import annotations

import json
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from conversion.convert import REWARD_HEAD_KEY
from conversion.files.durable import sync_file
from conversion.files.limits import LimitedThread
from conversion.files.manifest import HF_CONFIG_FILE, RUN_CONFIG_FILE, WRITTEN, WriteReport, file_record, tell_written
from conversion.files.reading import open_file
from conversion.files.torch_dist import TorchDistFolder
from mrl import spans
from mrl.config.texts import rounded
from mrl.gpus import on_gpu
from mrl.policy import checkpoint_entries
from mrl.policy.checkpoint_entries import WeightEntries
from mrl.policy.lora import ADAPTERS
from mrl.policy.optimizer import TrainState, hybrids, own_settings, parts, recognise_groups
from mrl.policy.output import REWARD_HEAD

logger = logging.getLogger(__name__)

# NeMo RL's layout: a run's step has one Megatron checkpoint, always of iteration 0.
ITERATION_FOLDER = "iter_0000000"
LATEST_FILE = "latest_checkpointed_iteration.txt"
COMMON_FILE = "common.pt"
"""Megatron's name of the file with the values of a checkpoint that are no tensors."""

PROBE_BYTES = 2**20

_ADDED = (f"{ADAPTERS}.", f"{REWARD_HEAD}.")

# Optimizer state by parameter rather than by shard, the same keys whether or not the model has experts, and keys of its
# own for each layer.
_FORMAT = {
    "distrib_optim_sharding_type": checkpoint_entries.SHARDING_TYPE,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
}


def find_obstacle(weights_dir: Path) -> str:
    """Makes a checkpoint's folder; returns "", or why a rank cannot write there. Collective over all ranks; one answer.

    Rank 0 writes a probe that is larger than its first files.
    """
    folder, problem = weights_dir / ITERATION_FOLDER, ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
    except OSError as error:
        problem = f"{folder}: {error}"
    return _first_problem(problem)


def _first_problem(problem: str) -> str:
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def begin_save(
    weights_dir: Path,
    state: TrainState,
    *,
    hf_config: Mapping[str, object],
    save_optimizer: bool,
    frozen: Mapping[str, object],
    adapters: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointWrite:
    """Starts writing `weights_dir/iter_0000000` and a file naming it. Collective over all ranks; needs settled weights.

    Call `find_obstacle` first: no rank may write before rank 0 has checked that the folder is empty. The checkpoint is
    complete once `finish` of the result has returned. With `group`, of all ranks and for this alone, a thread writes a
    copy of the present state in host memory; weights may change meanwhile, and `read_written` says when it is complete.
    `frozen` has the settings that leave weights untrained. `adapters` is `Lora.description`, None without adapters; the
    checkpoint holds them apart. OSError, on all ranks: one cannot write, or has no memory for the copy.
    """
    folder = weights_dir / ITERATION_FOLDER
    weights, others = _model_state(state)
    sharded: ShardedStateDict = {"model": checkpoint_entries.written_here(weights), "others": others}
    if save_optimizer:
        if not (distributed := _distributed(state)):
            optimizer = state.optimizer.sharded_state_dict(weights, metadata=_metadata())
        elif len(distributed) == 1:
            optimizer = checkpoint_entries.optimizer_state(distributed[0], weights)
        else:
            state.optimizer._synchronize_steps()
            optimizer = {
                index: checkpoint_entries.optimizer_state(part, weights) for index, part in enumerate(distributed)
            }
        sharded |= {"optimizer": optimizer, "rng": _rng_state()}
    peft = {} if adapters is None else {"peft": dict(adapters)}
    optimizer_form: dict[str, object] = {}
    if save_optimizer:
        optimizer_form = {
            "optimizer": state.optimizer.config.optimizer,
            "use_distributed_optimizer": state.optimizer.config.use_distributed_optimizer,
            "frozen": dict(frozen),
        }
    sharded |= {"checkpoint_version": 3.0, "iteration": 0, "parallel": _parallel_sizes(), **peft}
    # Also without optimizer state, so that the schedule continues.
    sharded["opt_param_scheduler"] = state.scheduler.state_dict()
    sharded, common = save_preprocess({**sharded, "content_metadata": _FORMAT})
    problem, run_config = "", {"model": _parallel_sizes(), "optimizer": optimizer_form, **peft}
    if dist.get_rank() == 0:
        try:
            # From 0.17 on, Megatron pickles these values among the tensors; it still reads the file.
            torch.save(common, folder / COMMON_FILE)
            (folder / HF_CONFIG_FILE).write_text(json.dumps(hf_config, indent=2))
            (folder / RUN_CONFIG_FILE).write_text(json.dumps(run_config, indent=2))
            (weights_dir / LATEST_FILE).write_text("0")
            if group is not None:
                (weights_dir / WRITTEN).touch()
        except (OSError, RuntimeError) as error:  # torch's writer turns disk errors into the second
            problem = f"{folder}: {error}"
    if problem := _first_problem(problem):
        raise OSError(problem)
    try:
        plan = _plan(sharded, folder, group)
    except CheckpointException as error:
        raise OSError(f"{folder}: {_reason(error)}") from error
    return CheckpointWrite(folder, *plan, group)


def _reason(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"policy rank {rank}: {type(cause).__name__}: {cause}"


class CheckpointWrite:
    """Writes a checkpoint together with the other ranks, in a thread or at once."""

    def __init__(
        self,
        folder: Path,
        write: Callable[[], None],
        write_metadata: Callable[[], None],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Starts writing; without `group`, returns once files are on disk or one fails. Collective over all ranks."""
        self._folder, self._group = folder, group
        self._begun_at = time.monotonic()
        self._written: Future[WriteReport]
        if group is not None:
            thread = LimitedThread("checkpoint")
            self._written = thread.begin(self._write, write, write_metadata)
            thread.end()
        else:
            self._written = Future()
            self._written.set_result(self._write(write, write_metadata))

    def finish(self, timeout_s: float) -> WriteReport:
        """Waits until all ranks have written; may be called again. Not collective."""
        waited_from_s = time.monotonic() - self._begun_at
        wait([self._written], timeout=timeout_s)
        if not self._written.done():
            raise TimeoutError(f"{self._folder}: not written within {rounded(timeout_s)} s (deadlines.checkpoint_s)")
        report = self._written.result(timeout=0)
        return replace(report, hidden_s=min(report.hidden_s, waited_from_s) if self._group is not None else 0.0)

    def _write(self, write: Callable[[], None], write_metadata: Callable[[], None]) -> WriteReport:
        """Writes this rank's file, then all files' metadata, unless a rank has failed. Collective over all ranks."""
        reports = [WriteReport({}, 0.0)] * dist.get_world_size()
        dist.all_gather_object(reports, self._write_own(write), group=self._group)
        problem = next((report.problem for report in reports if report.problem), "")
        if not problem:
            try:
                write_metadata()
            except CheckpointException as error:
                problem = f"{self._folder}: {_reason(error)}"
        if self._group is not None and dist.get_rank() == 0:
            tell_written(self._folder.parent, [] if problem else reports)
        return WriteReport({}, 0.0, problem) if problem else reports[dist.get_rank()]

    def _write_own(self, write: Callable[[], None]) -> WriteReport:
        try:
            with spans.span("write", "checkpoint writer"):
                write()
                paths = list(self._folder.glob(f"__{dist.get_rank()}_*.distcp"))
                for path in paths:
                    sync_file(path)
                files = {f"{self._folder.name}/{path.name}": file_record(path) for path in paths}
        except Exception as error:  # torch's writer turns disk errors into several types
            return WriteReport(
                {},
                0.0,
                f"{self._folder}: this rank's part of the checkpoint could not be written: {str(error) or repr(error)}",
            )
        return WriteReport(files, hidden_s=time.monotonic() - self._begun_at)


def _plan(
    sharded: ShardedStateDict, folder: Path, group: dist.ProcessGroup | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Plans a write: returns a function for this rank's file (needs no other rank) and one for all files' metadata.

    The metadata function is collective over `group`, and this one over all ranks. With a `group`, the state may change
    before the write.

    Torch's own writer writes in the rank's process: Megatron's starts processes, which costs seconds and may fail in
    actors.
    """
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    # torch copies ahead in a thread that uses the first GPU instead of this rank's.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    ranks = _DistWrapper(None, True, 0)
    metadata: list[Metadata] = []
    results: list[WriteResult] = []

    def local_plan() -> SavePlan:
        if group is not None:
            # One tensor at a time, so that tensors which only the save holds are freed on the way.
            for entry in (entry for entries in by_key.values() for entry in entries):
                if isinstance(entry, ShardedTensor) and entry.data is not None:
                    entry.data = entry.data.detach().to("cpu", copy=True)
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        plan = planner.create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                # Some loaders create tensors from the properties in the metadata, and cannot pin them.
                item.tensor_data.properties.pin_memory = False
        return writer.prepare_local_plan(plan)

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, found = planner.create_global_plan(plans)
        metadata.append(found)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.reduce_scatter("plan", local_plan, global_plan))

    def write() -> None:
        results.extend(writer.write_data(plan, planner).value())

    def finish(all_results: list[list[WriteResult]]) -> None:
        writer.finish(metadata[0], all_results)
        # Megatron takes a folder with this file for a complete checkpoint.
        save_config(CheckpointingConfig("torch_dist"), str(folder))

    return write, lambda: _DistWrapper(group, True, 0).all_reduce("write", lambda: results, finish)


def load(
    weights_dir: Path, state: TrainState, *, adapters: Mapping[str, object] | None = None, is_start: bool = False
) -> bool:
    """Fills model, optimizer, schedule and, at the saved layout, random states; returns whether it has optimizer state.

    Collective over all ranks. Optimizer and schedule keep the settings of `state`. A checkpoint without optimizer state
    leaves moments unchanged, and main parameters follow the weights. `adapters` describes those of `state`, None
    without any. With `is_start`, the checkpoint is a run's starting model: schedule, adapters, and a reward head that
    the model lacks stay unchanged.
    """
    # Megatron's own loader would unpickle any object that metadata and shards name, functions included.
    source = TorchDistFolder(weights_dir / ITERATION_FOLDER, verify=False)
    common = _read_common(source.folder / COMMON_FILE)
    if common.get("peft") != (None if is_start else adapters):
        raise ValueError(
            f"{source.folder} was saved with policy.megatron_cfg.peft {common.get('peft')}, and this run has "
            f"{adapters}: its weights would mean something else; give the settings that saved it, or start from "
            "what `python -m mrl.convert mcore-to-hf` makes of it"
        )
    weights, _ = _model_state(state)
    models = [unwrap_model(chunk) for chunk in state.chunks]
    live = {tensor.data_ptr() for model in models for tensor in (*model.parameters(), *model.buffers())}
    assert all(entry.data.data_ptr() in live for entry in weights.values()), "a load must fill the weights themselves"
    if is_start:
        added = _ADDED[:1] if REWARD_HEAD_KEY in source.keys else _ADDED
        weights = {name: entry for name, entry in weights.items() if not name.partition("/")[2].startswith(added)}
    checkpoint_entries.read_weights(source, weights)
    has_optimizer = "optimizer" in common
    if has_optimizer:
        with own_settings(state.optimizer):
            _load_optimizer(source, state, weights, common["optimizer"])
        if hybrids(state.optimizer):
            # Of an optimizer on the host Megatron takes a step with random gradients, which makes the state that it
            # fills.
            checkpoint_entries.read_weights(source, weights)
    else:
        state.optimizer.reload_model_params()
    if not is_start and "opt_param_scheduler" in common:
        # Rates follow from the number of steps, which Megatron's own loader would add to the steps taken so far.
        state.scheduler.num_steps = common["opt_param_scheduler"]["num_steps"]
        state.scheduler.step(0)
    elif not is_start:
        logger.warning(
            "%s has no state of the learning rate's schedule, which starts from its beginning", source.folder
        )
    if has_optimizer and common["parallel"] == _parallel_sizes():
        rng = _rng_state()
        checkpoint_entries.read_tensors(source, rng.values())
        states = {name: part.data for name, part in rng.items() if part.data is not None}
        torch.set_rng_state(states.pop("cpu"))
        if "cuda" in states:
            torch.cuda.set_rng_state(states.pop("cuda"))
        tensor_parallel.get_cuda_rng_tracker().set_states(states)
    return has_optimizer


def _load_optimizer(source: TorchDistFolder, state: TrainState, weights: WeightEntries, common: dict[str, Any]) -> None:
    recognise_groups(common, state.optimizer)
    distributed = _distributed(state)
    try:
        if distributed:
            for part in [common] if len(distributed) == 1 else common.values():
                # Left by rank 0 if it trains nothing; Megatron would look in it for the shards, which are read below.
                part.pop("param_state", None)
            state.optimizer.load_state_dict(common)
        else:
            wanted = {"optimizer": state.optimizer.sharded_state_dict(weights, is_loading=True, metadata=_metadata())}
            wanted, local, factories = load_preprocess(wanted)
            tensors, _ = extract_sharded_base(wanted)
            checkpoint_entries.read_tensors(source, nested_values(tensors))
            found = merge(merge({"optimizer": common}, local), dict_list_map_outplace(lambda part: part.data, tensors))
            state.optimizer.load_state_dict(apply_factory_merges(found, factories)["optimizer"])
    # 0.16.1 raises a KeyError, and 0.19 a ValueError.
    except (KeyError, ValueError) as error:
        is_distributed = state.optimizer.config.use_distributed_optimizer
        setting = f"policy.megatron_cfg.optimizer.use_distributed_optimizer={is_distributed}"
        raise ValueError(
            f"{source.folder} has no optimizer state in the form of {setting} ({error!r}): set that as it was at "
            "the save, or start a run from what `python -m mrl.convert mcore-to-hf` makes of it"
        ) from error
    if distributed:
        checkpoint_entries.read_optimizer_state(source, distributed, weights)
        for hybrid in hybrids(state.optimizer):
            hybrid._sync_hdo_state_to_sub_optimizers()


def _read_common(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_file(path), "rb") as file:
            common = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is missing, damaged, or no plain data, so it is not read: {error}; restore the checkpoint"
        ) from error
    if not isinstance(common, dict):
        raise ValueError(
            f"{path} holds a {type(common).__name__} instead of the plain values of a checkpoint; restore the "
            "checkpoint"
        )
    return common


def _parallel_sizes() -> dict[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _model_state(state: TrainState) -> tuple[WeightEntries, ShardedStateDict]:
    """Entries of all weights, and those of Transformer Engine's FP8 scales.

    Modules with such scales differ by version and host, and scales are empty without FP8: no load asks for them.
    """
    weights: WeightEntries = {}
    others: ShardedStateDict = {}
    for index, chunk in enumerate(state.chunks):
        # Only this process uses the name's prefix: keys in the files count layers over the whole model.
        for name, entry in unwrap_model(chunk).sharded_state_dict(metadata=_metadata()).items():
            is_scale = "_extra_state" in name.rpartition(".")[2]
            (others if is_scale else weights)[f"{index}/{name}"] = entry
    return weights, others


def _distributed(state: TrainState) -> list[DistributedOptimizer]:
    return [part for part in parts(state.optimizer) if isinstance(part, DistributedOptimizer)]


def _metadata() -> dict[str, object]:
    return {**_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _rng_state() -> dict[str, ShardedTensor]:
    states = {"cpu": torch.get_rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
    if on_gpu():
        states["cuda"] = torch.cuda.get_rng_state()
    row = (0, dist.get_rank(), dist.get_world_size())
    return {
        name: ShardedTensor.from_rank_offsets(f"rng.{name}", value.clone(), row, prepend_axis_num=1)
        for name, value in states.items()
    }
