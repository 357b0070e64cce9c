# SPDX-License-Identifier: Apache-2.0
"""A worker of an engine of several groups (`mrl.rollout.groups`). vLLM imports this module in worker processes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from mrl.rollout.groups import GroupsOutput, group_size

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class GroupWorker(Worker):
    """vLLM's worker, as worker `rank % size` of group `rank // size`. It takes part in each pass of any group."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        parallel, size = vllm_config.parallel_config, group_size(vllm_config)
        self._rank_of_all = rank
        self._group, self._rank_in_group = divmod(rank, size)
        self._output: ModelRunnerOutput | AsyncModelRunnerOutput | None = None
        parallel.data_parallel_size = parallel.data_parallel_size_local = parallel.world_size // size
        parallel.data_parallel_rank = parallel.data_parallel_index = self._group
        # `local_rank` counts over the groups of this node already.
        parallel.data_parallel_rank_local = 0
        parallel.tensor_parallel_size = parallel.world_size = size
        is_first = self._rank_in_group == 0
        super().__init__(
            vllm_config, local_rank, self._rank_in_group, distributed_init_method, is_driver_worker=is_first
        )

    def init_device(self) -> None:
        super().init_device()
        # vLLM's process of this worker finds its messages by the rank, and those of further nodes by this group.
        self.rank = self._rank_of_all
        if self.parallel_config.nnodes > 1:
            parallel_state._INNER_DP_WORLD = parallel_state.get_world_group()

    def execute_groups(self, scheduled: GroupsOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """This worker's part of a pass. vLLM's `execute_model` stays as is, as its warm-up calls it in each worker."""
        mine = scheduled.groups[self._group]
        self._output = self.execute_model(mine)
        if not scheduled.total_num_scheduled_tokens:
            return self._output
        if not mine.total_num_scheduled_tokens:
            # The experts here are needed by the other groups.
            self.execute_dummy_batch()
        return None

    def sample_groups(
        self, grammars: Sequence[GrammarOutput | None]
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Draws the tokens of the pass in this worker's group."""
        output = self.sample_tokens(grammars[self._group]) if self._output is None else self._output
        return output if self._rank_in_group == 0 else None
