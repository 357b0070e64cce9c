# SPDX-License-Identifier: Apache-2.0
"""An engine of several worker groups: each holds all attention over its tensor-parallel size; all share the experts.

vLLM calls this data parallelism with expert parallelism, and starts an engine for each group, which wait for each other
in every pass. Here one engine has a scheduler for each group and one executor for all workers: each pass begins in all
groups with one call, so that none can fall behind, and refits, sleep, aborts, further nodes and the death of a worker
are those of any engine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore
from vllm import EngineArgs, LLMEngine, envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

# Key of vLLM's `additional_config`, which comes to the workers.
_GROUP_SIZE = "mrl_group_size"


def start_groups(arguments: EngineArgs) -> LLMEngine:
    """Starts vLLM's engine with `arguments.data_parallel_size` groups."""
    num_groups = arguments.data_parallel_size
    config = as_one(arguments.create_engine_config())
    with meeting_on_loopback(config.parallel_config) as store:
        llm = LLMEngine(vllm_config=config, executor_class=GroupExecutor, log_stats=False)
    assert isinstance(llm.engine_core, InprocClient)
    core = llm.engine_core.engine_core
    assert isinstance(core.model_executor, GroupExecutor)
    core.model_executor.store = store
    first = core.scheduler
    assert isinstance(first, Scheduler)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(first.kv_cache_config, config)
    further = [
        type(first)(
            vllm_config=config,
            kv_cache_config=first.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        for _ in range(num_groups - 1)
    ]
    core.scheduler = GroupScheduler([first, *further])
    return llm


@contextmanager
def meeting_on_loopback(parallel: ParallelConfig) -> Iterator[TCPStore | None]:
    """Makes workers of one node, started in the `with` block, meet at this store; those of several nodes already do.

    vLLM's first worker would listen at a port of all interfaces, which was found free before the worker was started.
    """
    if parallel.nnodes > 1:
        yield None
        return
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    parallel.data_parallel_master_ip, port = held.getsockname()
    parallel._data_parallel_master_port_list = [port]
    # torch's name for a store that somebody else holds.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    limit = timedelta(seconds=envs.VLLM_ENGINE_READY_TIMEOUT_S)
    try:
        yield TCPStore(
            "127.0.0.1", port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=held.detach()
        )
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def as_one(config: VllmConfig) -> VllmConfig:
    """Makes vLLM's executor start the workers of all groups as those of one; each joins its group (`GroupWorker`)."""
    parallel = config.parallel_config
    assert isinstance(config.additional_config, dict)
    config.additional_config |= {_GROUP_SIZE: parallel.tensor_parallel_size}
    parallel.worker_cls = "mrl.rollout.group_worker.GroupWorker"
    parallel.tensor_parallel_size = parallel.world_size = parallel.tensor_parallel_size * parallel.data_parallel_size
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank = parallel.data_parallel_index = 0
    return config


def group_size(config: VllmConfig) -> int:
    """Workers of each group, by a config that `as_one` has changed."""
    assert isinstance(config.additional_config, dict)
    return config.additional_config[_GROUP_SIZE]


@dataclass(frozen=True)
class GroupsOutput:
    """A pass of all groups; a group without requests has an empty part."""

    groups: Sequence[SchedulerOutput]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(group.total_num_scheduled_tokens for group in self.groups)

    @property
    def pending_structured_output_tokens(self) -> bool:
        return any(group.pending_structured_output_tokens for group in self.groups)


class GroupExecutor(MultiprocExecutor):
    """vLLM's executor, which brings an answer of each group."""

    store: TCPStore | None = None
    """Store at which workers met; later groups of theirs do, too."""

    def execute_model(self, scheduler_output: GroupsOutput, non_block: bool = False) -> object:
        return self._of_groups("execute_groups", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: object, non_block: bool = False) -> object:
        return self._of_groups("sample_groups", grammar_output, non_block)

    def _of_groups(self, method: str, argument: object, non_block: bool) -> object:
        timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        found = self.collective_rpc(method, args=(argument,), timeout=timeout, non_block=non_block)
        if not non_block:
            return self._first_of_groups(found)
        assert isinstance(found, FutureWrapper)
        found.aggregate = self._first_of_groups
        return found

    def _first_of_groups(
        self, answers: Sequence[ModelRunnerOutput | None]
    ) -> Sequence[ModelRunnerOutput | None] | None:
        found = answers[:: group_size(self.vllm_config)]
        # None asks for a call of `sample_tokens`; only as one do workers ask so.
        return None if found[0] is None else found


class GroupScheduler(SchedulerInterface):
    """All groups' schedulers as one. A request comes to the group with fewest; a question's answers stay together."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers

    def schedule(self, throttle_prefills: bool = False) -> GroupsOutput:
        return GroupsOutput([scheduler.schedule(throttle_prefills) for scheduler in self.schedulers])

    def get_grammar_bitmask(self, scheduler_output: GroupsOutput) -> list[GrammarOutput | None] | None:
        found: list[GrammarOutput | None] = []
        for scheduler, part in zip(self.schedulers, scheduler_output.groups, strict=True):
            grammar = scheduler.get_grammar_bitmask(part)
            # The next group's bits come into the same buffer.
            found.append(grammar and replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy()))
        return found

    def update_from_output(
        self, scheduler_output: GroupsOutput, model_runner_output: Sequence[ModelRunnerOutput]
    ) -> dict[int, EngineCoreOutputs]:
        parts = zip(self.schedulers, scheduler_output.groups, model_runner_output, strict=True)
        found = [scheduler.update_from_output(part, output) for scheduler, part, output in parts]
        # The one client of an engine in this process is number 0.
        return {
            0: EngineCoreOutputs(
                outputs=[output for one in found for client in one.values() for output in client.outputs]
            )
        }

    def add_request(self, request: Request) -> None:
        # vLLM adds the answers to a question as `0_ID`, `1_ID`, ... in one call; their routes are asked for together,
        # too.
        first = f"0_{request.request_id.partition('_')[2]}"
        siblings = [scheduler for scheduler in self.schedulers if first in scheduler.requests]
        min(siblings or self.schedulers, key=Scheduler.get_num_unfinished_requests).add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        named = [request_ids] if isinstance(request_ids, str) else request_ids and list(request_ids)
        return [one for scheduler in self.schedulers for one in scheduler.finish_requests(named, finished_status)]

    def get_num_unfinished_requests(self) -> int:
        return sum(scheduler.get_num_unfinished_requests() for scheduler in self.schedulers)

    def has_finished_requests(self) -> bool:
        return any(scheduler.has_finished_requests() for scheduler in self.schedulers)

    def has_requests(self) -> bool:
        return any(scheduler.has_requests() for scheduler in self.schedulers)

    @property
    def pause_state(self) -> PauseState:
        return self.schedulers[0].pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        for scheduler in self.schedulers:
            scheduler.set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return all(
            [scheduler.reset_prefix_cache(reset_running_requests, reset_connector) for scheduler in self.schedulers]
        )

    def reset_encoder_cache(self) -> None:
        for scheduler in self.schedulers:
            scheduler.reset_encoder_cache()

    def get_request_counts(self) -> tuple[int, int]:
        counts = [scheduler.get_request_counts() for scheduler in self.schedulers]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def make_stats(self) -> SchedulerStats | None:
        return None

    def shutdown(self) -> None:
        for scheduler in self.schedulers:
            scheduler.shutdown()

    def update_draft_token_ids(self, draft_token_ids: object) -> NoReturn:
        raise AssertionError("mrl.config.rules.layout refuses speculation with several groups")

    def update_draft_token_ids_in_output(self, draft_token_ids: object, scheduler_output: object) -> NoReturn:
        raise AssertionError("mrl.config.rules.layout refuses speculation with several groups")
