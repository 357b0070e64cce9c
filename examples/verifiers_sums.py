# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""A taskset of verifiers for `verifiers_agent.py`: additions of two-digit numbers."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        left, _, right = str(self.data.prompt).rstrip("=").partition("+")
        return float(trace.last_reply.strip() == str(int(left) + int(right)))


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for left in range(10, 90):
            right = 10 + 7 * left % (90 - left)
            yield SumTask(vf.TaskData(prompt=f"{left}+{right}="), self.config.task)
