# SPDX-License-Identifier: Apache-2.0
"""Gateway as a Ray actor: agents ask it for the model, and run in or from it. The driver sees rewards and lengths."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import urlsplit

import ray

from mrl.cluster.book import GENERATION, ActorWork, RequestBook
from mrl.cluster.calls import Actors, answered, ask, start_actor
from mrl.cluster.engines import EngineGroup
from mrl.cluster.environment import start_actor_process
from mrl.cluster.errors import ActorLost
from mrl.cluster.event_loop import in_loop
from mrl.cluster.payload import Packed, pack
from mrl.cluster.runtime import Placement
from mrl.config.rules.data import is_agent
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rounded, safe_text
from mrl.data.verifiers import command_of, variables_of
from mrl.plan.deadlines import start_deadline
from mrl.rollout.agents import AgentRunner, AgentTask, FunctionAgent, Ran
from mrl.rollout.gateway import EngineServers, Gateway
from mrl.rollout.gym_process import reach_gym
from mrl.rollout.http_gate import listen, make_server
from mrl.rollout.remote import RemoteAgent
from mrl.types import PayloadRef, Prompt, Rollout, RolloutInfo, SamplingParams, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
T = TypeVar("T")

GATEWAY = "gateway"
# The actor answers so often, as a sign of life, and gathers what ends within so long of the first.
ANSWER_S, GATHER_S = 1.0, 0.05
# The loop answers at once, unless the kernel keeps it from its work.
STUCK_S = 60.0
# One call hands tasks in while another waits, and a further one brings the addresses of engines.
NUM_CALLS = 4


@dataclass(frozen=True)
class EndedRollout:
    """An agent's rollout as the driver sees it."""

    info: RolloutInfo
    verdict: Verdict
    engines: Sequence[int]


@dataclass(frozen=True)
class Progress:
    """Results of the gateway since its last answer. Payloads come along, sequence by sequence in the same order."""

    ended: Mapping[str, tuple[list[RolloutInfo], Verdict, Sequence[int]]]
    num_answered: int
    """Requests of agents that engines have answered."""
    num_asked: int
    """Requests of agents under way at engines."""
    unreachable: set[int]
    waiting: Mapping[str, tuple[int, str]]
    """Number of rollouts that wait for an agent that cannot be reached, and the reason, by the agent's name."""
    blocked: Mapping[str, str]
    """Lines at which an agent has blocked the others of its process, and the agent's name."""


class AgentRuns:
    """Rollouts of agents under way, and those that have ended. For the gateway's event loop.

    Apart from the actor: Ray would run one with coroutines in an event loop of its own, during which no signal is
    handled.
    """

    def __init__(self, runner: AgentRunner) -> None:
        self.runner = runner
        self._work = ActorWork[Ran]()
        self._num_told = 0

    async def take(self, tasks: Sequence[AgentTask]) -> tuple[Progress, Packed]:
        """See `GatewayActor.run`."""
        for task in tasks:
            self._work.begin(self._run(task))
        ended = await self._work.take(ANSWER_S, gather_s=GATHER_S)
        gateway, rollouts = self.runner.gateway, list[Rollout]()
        infos = dict[str, tuple[list[RolloutInfo], Verdict, Sequence[int]]]()
        for request_id, ran in ended.items():
            infos[request_id] = [RolloutInfo.of(rollout) for rollout in ran.rollouts], ran.verdict, ran.engines
            rollouts += ran.rollouts
        unreachable, gateway.engines.unreachable = gateway.engines.unreachable, set()
        num_answered, self._num_told = gateway.num_answered - self._num_told, gateway.num_answered
        waiting, blocked = self.runner.waiting(), self.runner.blocked()
        return Progress(infos, num_answered, gateway.engines.num_asked, unreachable, waiting, blocked), pack(rollouts)

    async def _run(self, task: AgentTask) -> None:
        self._work.answer(task.request_id, await self.runner.run(task))


class GatewayActor:
    """Serves agents from an event loop in a thread; its calls come in threads of Ray's."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        self.config, self.log_file = config, log_file
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="gateway", daemon=True).start()

    def ready(self, port: int | None, api_key: str, engine_key: str, base_urls: Sequence[str]) -> str:
        """Listens at `port`, or at any free one, and starts the agents; returns the gateway's URL."""
        generation, section = self.config.policy.generation, self.config.env
        host = ray.util.get_node_ip_address()
        if port is None and section.has_gym_servers:
            port = urlsplit(section.nemo_gym.policy_base_url or "").port  # which servers that run already ask
        ports = range(generation.port_range_low, generation.port_range_high) if port is None else range(port, port + 1)
        listener = listen(host, ports)
        url = f"http://{host}:{listener.getsockname()[1]}"

        async def start() -> tuple[AgentRuns, asyncio.Task[None]]:
            max_model_len, gym_key, timeout_s = (
                generation.vllm_cfg.max_model_len,
                section.nemo_gym.policy_api_key,
                section.agent_timeout_s,
            )
            gateway = Gateway(
                EngineServers(engine_key),
                api_key=api_key,
                max_model_len=max_model_len,
                gym_key=gym_key,
                timeout_s=timeout_s,
            )
            gateway.engines.set_addresses(base_urls)
            masks_flagged = section.should_mask_flagged_samples
            runner = AgentRunner(gateway, url=url, timeout_s=section.agent_timeout_s, masks_flagged=masks_flagged)
            for name, path in section.own.agents.items():
                runner.agents[name] = [FunctionAgent(path) for _ in range(section.own.num_workers or 1)]
            runner.agents |= {name: [RemoteAgent(address)] for name, address in section.remote.items()}
            runner.agents |= {
                name: [FunctionAgent(f"env.verifiers.{name}", command_of(name, section), variables_of(python))]
                for name, python in section.verifiers.items()
            }
            server = make_server(gateway.app(), has_key=gateway.has_key, max_body=gateway.max_body)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            if section.has_gym_servers:
                folder = self.log_file.parent / "nemo_gym"
                runner.gym = await reach_gym(
                    section.nemo_gym, gateway_url=url, key=gateway.gym_key, host=host, folder=folder
                )
            await asyncio.gather(*(agent.start() for agents in runner.agents.values() for agent in agents))
            return AgentRuns(runner), serving

        self.runs, self._serving = asyncio.run_coroutine_threadsafe(start(), self.loop).result(start_s(self.config))
        return url

    def set_addresses(self, base_urls: Sequence[str]) -> None:
        """Sets the engines' present addresses."""
        self.loop.call_soon_threadsafe(self.runs.runner.gateway.engines.set_addresses, base_urls)

    def run(self, tasks: Sequence[AgentTask]) -> tuple[Progress, Packed]:
        """Begins tasks; returns rollouts ended since the last call: metadata, payload. Waits up to `ANSWER_S` for one.

        A later call ends the wait of an earlier one. RuntimeError: a function cannot be loaded any more.
        """
        return asyncio.run_coroutine_threadsafe(self.runs.take(tasks), self.loop).result(ANSWER_S + STUCK_S)

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(actor, *arguments)`: tests look inside with it."""
        return function(self, *arguments)


class AgentGateway(Actors[GatewayActor]):
    """The driver's handle on the gateway. `book` carries tasks; a dead one restarts at its address, asked again."""

    def __init__(self, config: RunConfig, placement: Placement, engines: EngineGroup, *, log_folder: Path) -> None:
        super().__init__(GATEWAY, deadline_s=config.deadlines.reward_s)
        self.config, self.placement, self.engines, self.log_folder = config, placement, engines, log_folder
        self.news = engines.news
        self.api_key = secrets.token_urlsafe(32)
        self.url: str | None = None
        self.book = RequestBook[AgentTask, EndedRollout](
            GATEWAY, 1, self._run, self._restart, news=self.news, num_calls=2
        )
        self._starting: ray.ObjectRef[str] | None = None
        self._waiting: set[str] = set()
        """Agents that have been said to be waited for."""
        self._blocked: set[str] = set()
        """Lines that have been said to block."""
        self.handles = [self._start()]
        engines.on_addresses = self.tell_addresses
        in_loop(self.book.begin, 0)

    def wait_until_built(self) -> None:
        """Waits until agents can be run. RuntimeError: a function cannot be loaded."""
        assert self._starting is not None
        starting, self._starting = self._starting, None
        urls = self.wait({self.name(0): starting}, deadline_s=start_s(self.config), what="start")
        self.url = urls[0]
        self.engines.gateway = f"{self.url}/v1", self.api_key
        self.engines.publish()
        names = [
            *sorted(self.config.env.agents),
            *(["those of NeMo Gym's servers"] if self.config.env.has_gym_servers else []),
        ]
        logger.info("Agents ask the gateway at %s: %s", self.url, ", ".join(names))

    def does(self, env_name: str) -> bool:
        """Tells whether an agent handles the rows of an environment."""
        return is_agent(env_name, self.config.env)

    def tell_addresses(self) -> None:
        """Sends the engines' addresses to the gateway, as they may have changed."""
        self.handles[0].set_addresses.remote(list(self.engines.base_urls))

    async def run_agent(
        self, prompt: Prompt, rollout_index: int, epoch: int, seed: int, sampling: SamplingParams, weight_version: int
    ) -> EndedRollout:
        """Runs an agent on a row."""
        task = AgentTask(prompt, rollout_index, epoch, seed, sampling, weight_version)
        return await self.book.ask(task.request_id, task)

    async def _run(self, index: int, tasks: list[AgentTask]) -> dict[str, EndedRollout]:
        if (starting := self._starting) is not None:
            await answered(starting, actor=self.name(index), what="start")
            self._starting = None if self._starting is starting else self._starting
            self.tell_addresses()  # those of engines that have come back meanwhile
        answer = self.handles[index].run.options(num_returns=2).remote(tasks)
        reference, payload = cast("tuple[ray.ObjectRef[Progress], ray.ObjectRef]", answer)
        progress = await answered(reference, actor=self.name(index), what="agents")
        for engine in progress.unreachable:
            asyncio.ensure_future(self.engines.look_after(engine))
        self._say_waiting(progress.waiting)
        for place in progress.blocked.keys() - self._blocked:
            self._blocked.add(place)
            way_out = "await what takes long, or call it by asyncio.to_thread"
            logger.warning(
                "Agent %s blocks all agents of its process: %s; %s", progress.blocked[place], safe_text(place), way_out
            )
        # While no engine is asked, agents work or are waited for, each until its own deadline: the run does not hang.
        if progress.num_answered or progress.ended or not progress.num_asked:
            self.news.tell(GENERATION)
        ended, place = dict[str, EndedRollout](), 0
        for request_id, (infos, verdict, engines) in progress.ended.items():
            found = [
                dataclasses.replace(info, payload=PayloadRef(payload, place + at)) for at, info in enumerate(infos)
            ]
            place += len(infos)
            ended[request_id] = EndedRollout(as_one(found), verdict, engines)
        return ended

    def _say_waiting(self, waiting: Mapping[str, tuple[int, str]]) -> None:
        for name in waiting.keys() - self._waiting:
            count, reason = waiting[name]
            limit = f"each at most {rounded(self.config.env.agent_timeout_s)} s (env.agent_timeout_s)"
            logger.warning("%d rollouts wait for %s, %s: %s", count, name, limit, safe_text(reason))
        self._waiting = set(waiting)

    def _restart(self, index: int, lost: ActorLost) -> None:
        num_tasks = self.book.end(index, self._log_file)
        logger.warning("%s; starting it again, with the rollouts of its agents (%d)", lost, num_tasks)
        ray.kill(self.handles[index])
        self.handles[index] = self._start()
        self.news.tell(GENERATION, time.monotonic() + start_s(self.config))
        self.book.begin(index)

    def _start(self) -> ActorHandle[GatewayActor]:
        options = {**self.placement.options(self.placement.first_slots[0], {}), "max_concurrency": NUM_CALLS}
        actor = start_actor(GatewayActor, options, self.config, self._log_file)
        port = None if self.url is None else int(self.url.rpartition(":")[2])
        self._starting = ask(
            actor, GatewayActor.ready, port, self.api_key, self.engines.api_key, list(self.engines.base_urls)
        )
        return actor

    @property
    def _log_file(self) -> Path:
        return self.log_folder / "gateway.log"


def start_s(config: RunConfig) -> float:
    """Seconds that the gateway may take to start with all agents."""
    gym = config.env.nemo_gym
    return start_deadline(config).seconds + (gym.start_s if config.env.has_gym_servers else 0.0)


def as_one(sequences: Sequence[RolloutInfo]) -> RolloutInfo:
    """Joins the sequences of a rollout: the first one, with the others in it and the totals of all."""
    first, *others = sequences
    return dataclasses.replace(
        first,
        weight_version=min(one.weight_version for one in sequences),
        # One that has versions of its own mixes them with those of the others.
        num_weight_versions=max(
            *(one.num_weight_versions for one in sequences), len({one.weight_version for one in sequences})
        ),
        num_turns=sum(one.num_turns for one in sequences),
        finish_reason="length" if any(one.finish_reason == "length" for one in sequences) else first.finish_reason,
        further=tuple(dataclasses.replace(one, place=place) for place, one in enumerate(others, 1)),
    )


def start_gateway(
    config: RunConfig, placement: Placement, engines: EngineGroup, *, log_folder: Path
) -> AgentGateway | None:
    """The gateway, once the engines are up, if the config names agents."""
    if not config.env.has_agents:
        return None
    gateway = AgentGateway(config, placement, engines, log_folder=log_folder)
    gateway.wait_until_built()
    return gateway
