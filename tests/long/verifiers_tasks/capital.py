# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers, in whose Python this runs: tasks of a single turn."""

import zlib

import verifiers.v1 as vf

__all__ = ["CapitalTaskset"]


class CapitalTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_lucky(self, trace: vf.Trace) -> float:
        return float(zlib.crc32(trace.last_reply.encode()) % 2)


class CapitalTaskset(vf.Taskset[CapitalTask]):
    def load(self):
        return [CapitalTask(vf.TaskData(prompt=f"capital of {number}?"), self.config.task) for number in range(10, 20)]
