# SPDX-License-Identifier: Apache-2.0
"""Passes of vLLM's schedulers: counts the tokens drawn and computed again, and bounds the requests that run at once."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

AIM = 0.005
"""Share of the drawn tokens that a bounded scheduler computes again in the long run; half of what it is to stay below,
since it corrects itself only after preemptions.
"""


class Concurrency:
    """Watches one scheduler; with `is_bounded` decides how many of its requests run.

    vLLM lets requests run as soon as their tokens fit, and takes the cache from the last one when others grow; it comes
    back, with all its tokens to compute again, as soon as these fit. A bounded scheduler admits a request only if each
    running one could still grow to `kept_room` drawn tokens. That begins at 0, where nothing differs from vLLM. It
    rises by a token for each one that every running request has to compute again, and falls by `AIM` in each pass.
    """

    def __init__(self, scheduler: Scheduler, *, is_bounded: bool) -> None:
        self._scheduler = scheduler
        self._most = scheduler.max_num_active_reqs
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._blocks_per_token = sum(1 / spec.block_size for spec in specs)
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._preempt = scheduler._preempt_request
        self._is_bounded, self._is_scheduling = is_bounded, False
        self._lost: dict[str, int] = {}
        """Tokens that preempted requests had computed, by vLLM's id, until they run again."""
        self.kept_room = 0.0
        """Drawn tokens to which every running request may grow."""
        self.num_drawn = self.num_recomputed = 0
        """Tokens since the start; of the latter those of requests that lost their cache to others."""
        for name in ("schedule", "update_from_output", "_preempt_request"):
            setattr(scheduler, name, getattr(self, name))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules a pass, in vLLM's place."""
        scheduler, before = self._scheduler, sum(self._lost.values())
        if self._is_bounded:
            scheduler.max_num_active_reqs = self._most if self.kept_room == 0 else self._num_admitted()
        self._is_scheduling = True
        output = self._schedule(throttle_prefills)
        self._is_scheduling = False
        if self._is_bounded and (num_running := len(scheduler.running)):
            grown = self.kept_room + (sum(self._lost.values()) - before) / num_running - AIM
            self.kept_room = min(max(0.0, grown), float(scheduler.max_model_len))
        if self._lost:
            self._note_resumed(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in a pass, in vLLM's place."""
        found = self._update(scheduler_output, model_runner_output)
        self.num_drawn += sum(len(one.new_token_ids) for client in found.values() for one in client.outputs)
        return found

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        # A refit takes the cache from all requests outside a pass, which no bound could help.
        if self._is_scheduling:
            self._lost[request.request_id] = request.num_computed_tokens
        self._preempt(request, timestamp, drop_stale_output)

    def _num_admitted(self) -> int:
        """Requests that may run: those that do, and the next ones while all have room to grow."""
        scheduler = self._scheduler
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        room = num_free / self._blocks_per_token - sum(self._growth(request) for request in scheduler.running)
        num_admitted = len(scheduler.running)
        for request in scheduler.waiting:
            room -= request.num_tokens + self._growth(request)
            if room < 0 or num_admitted >= self._most:
                break
            num_admitted += 1
        return max(1, num_admitted)

    def _growth(self, request: Request) -> float:
        return max(0.0, self.kept_room - request.num_output_tokens)

    def _note_resumed(self, output: SchedulerOutput) -> None:
        requests, num_scheduled = self._scheduler.requests, output.num_scheduled_tokens
        for vllm_id in self._lost.keys() & num_scheduled.keys():
            # A part of its cache may be left, and come back.
            num_kept = requests[vllm_id].num_computed_tokens - num_scheduled[vllm_id]
            self.num_recomputed += max(0, self._lost.pop(vllm_id) - num_kept)
        self._lost = {vllm_id: lost for vllm_id, lost in self._lost.items() if vllm_id in requests}
