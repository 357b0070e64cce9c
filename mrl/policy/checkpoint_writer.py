"""Writes Megatron's torch_dist format in two parts: a collective plan at once, and this rank's bytes, in a thread if asked to.

Torch's own writer writes them in the rank's process: Megatron's starts processes, which costs seconds and may fail in actors.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from conversion.files.durable import sync_file
from conversion.files.manifest import FileRecord, file_record
from mrl.policy.reports import WriteReport


class InProcessStrategy(AsyncSaveShardedStrategy):
    """The parts of torch's `dcp.save`, as Megatron asks for them: planning, this rank's bytes, the metadata of all ranks."""

    def __init__(self, *, takes_snapshot: bool) -> None:
        """With `takes_snapshot`, the write takes a copy of the present state; otherwise nothing may change until it is done."""
        super().__init__("torch_dist", 1)
        self._takes_snapshot = takes_snapshot

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are written like tensors."""
        return True

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Plans the write; this rank's file, which needs no other rank, and a collective end are left. Collective over all ranks."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        if self._takes_snapshot:
            _copy_to_host(by_key)
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)
        # Copying ahead would make a thread use the first GPU, whichever is this rank's.
        writer = FileSystemWriter(checkpoint_dir, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        ranks = _DistWrapper(None, True, 0)
        metadata: list[Metadata] = []
        results: list[WriteResult] = []

        def local_plan() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
            plan = planner.create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    # Some loaders make tensors with the properties in the metadata, and cannot pin them.
                    item.tensor_data.properties.pin_memory = False
            return writer.prepare_local_plan(plan)

        def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
            plans, found = planner.create_global_plan(plans)
            metadata.append(found)
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(ranks.reduce_scatter("plan", local_plan, global_plan))

        def write() -> None:
            results.extend(writer.write_data(plan, planner).value())

        def write_metadata() -> None:
            ranks.all_reduce("write", lambda: results, lambda all_results: writer.finish(metadata[0], all_results))

        return AsyncRequest(async_fn=write, async_fn_args=(), finalize_fns=[write_metadata])


def _copy_to_host(by_key: ShardedStateDict) -> None:
    """Replaces each tensor by a copy in host memory, one after the other: tensors that only the save holds are freed on the way."""
    for entries in by_key.values():
        for entry in entries:
            if isinstance(entry, ShardedTensor) and entry.data is not None:
                entry.data = entry.data.detach().to("cpu", copy=True)


class CheckpointWrite:
    """Writes this rank's file of a checkpoint, in a thread or at once."""

    def __init__(self, folder: Path, request: AsyncRequest, *, in_background: bool) -> None:
        """Starts writing; without `in_background`, returns when the file is on disk."""
        self._folder = folder
        self._request = request
        self._in_background = in_background
        self._begun_at = time.monotonic()
        self._written: Future[tuple[dict[str, FileRecord], float]]
        if in_background:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._written = executor.submit(self._write)
            executor.shutdown(wait=False)
        else:
            self._written = Future()
            self._written.set_result(self._write())

    def is_done(self) -> bool:
        """Whether the file is on disk. Not collective.

        Raises:
            RuntimeError: it could not be written.
        """
        return self._written.done() and bool(self._written.result(timeout=0))

    def finish(self, timeout_s: float) -> WriteReport:
        """Waits for this rank's file, then writes the metadata of all ranks' files. Collective over all ranks.

        Raises:
            RuntimeError: this rank's file could not be written.
            TimeoutError: it is not written within `timeout_s`.
        """
        asked_at = time.monotonic()
        wait([self._written], timeout=timeout_s)
        if not self._written.done():
            raise TimeoutError(f"{self._folder}: not written within {timeout_s:g} s (deadlines.checkpoint_s)")
        files, written_at = self._written.result(timeout=0)
        for finish in self._request.finalize_fns:
            finish()
        return WriteReport(files, hidden_s=min(asked_at, written_at) - self._begun_at if self._in_background else 0.0)

    def _write(self) -> tuple[dict[str, FileRecord], float]:
        """Writes this rank's files; returns them and the time of the end."""
        assert self._request.async_fn is not None
        try:
            self._request.async_fn(*self._request.async_fn_args)
            paths = list(self._folder.glob(f"__{dist.get_rank()}_*.distcp"))
            for path in paths:
                sync_file(path)
            files = {f"{self._folder.name}/{path.name}": file_record(path) for path in paths}
        except Exception as error:
            # Torch's writer turns what the disk says into errors of several kinds.
            raise RuntimeError(
                f"{self._folder}: this rank's part of the checkpoint could not be written: {error}; free space on this disk, "
                "or choose another checkpointing.checkpoint_dir"
            ) from error
        return files, time.monotonic()
