# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers, in whose Python this runs: tasks with a tool. As a program it is the tool's server."""

import verifiers.v1 as vf

__all__ = ["WeatherTaskset"]


class WeatherTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def get_weather(self, city: str) -> str:
        """Return the weather in a city."""
        return f"{city} is cold"


class WeatherTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [WeatherTools(vf.ToolsetConfig())]

    @vf.reward
    async def has_asked(self, trace: vf.Trace) -> float:
        return float(any("Rome is cold" in str(message.content) for message in trace.tool_messages))


class WeatherTaskset(vf.Taskset[WeatherTask]):
    def load(self):
        return [WeatherTask(vf.TaskData(prompt=f"weather in {number}?"), self.config.task) for number in range(10, 20)]


if __name__ == "__main__":
    WeatherTools.run()
