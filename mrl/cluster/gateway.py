# SPDX-License-Identifier: Apache-2.0
"""Gateways as Ray actors: all ask them for the model over HTTP, and agents run in or from them.
Engines of judges, which they ask, too.

The driver sees rewards and lengths.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Never, TypeVar
from urllib.parse import urlsplit

import ray

from mrl import rooms, spans
from mrl.cluster import scheduling
from mrl.cluster.calls import ask, start_actor
from mrl.cluster.engines import EngineActor, EngineGroup, EngineLine, start_engine
from mrl.cluster.environment import engine_variables, importing, start_actor_process
from mrl.cluster.errors import ActorName
from mrl.cluster.payload import Packed, pack
from mrl.cluster.runtime import Placement
from mrl.cluster.service import ANSWER_S, GATEWAYS, LOOK_S, NUM_THREADS, STUCK_S, Service, judges_kind
from mrl.cluster.tasks import GENERATION, ActorWork, BackgroundTasks, in_loop, in_worker, wait_in_loop
from mrl.cluster.traces import Traces
from mrl.cluster.verbs import EngineVerbs
from mrl.config.judge_runs import judge_run
from mrl.config.rules.data import is_agent, parts_at_work
from mrl.config.schema.env import EnvConfig
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import split_secrets
from mrl.config.texts import rounded, safe_text
from mrl.data.planning import summaries
from mrl.data.verifiers import command_of, variables_of
from mrl.envs.endpoints import FILE_NAME, Endpoints, write_endpoints
from mrl.plan.deadlines import start_deadline
from mrl.plan.hardware import local_gpu
from mrl.plan.memory import with_limits
from mrl.rollout.agents import AgentResult, AgentRunner, AgentTask, FunctionAgent
from mrl.rollout.callers import EngineLines
from mrl.rollout.environment import set_variables, variables_of_children
from mrl.rollout.gateway import JUDGES, Gateway
from mrl.rollout.http_gate import CHAT_KEY, listen, make_server
from mrl.rollout.remote import RemoteAgent
from mrl.types import PayloadRef, Prompt, Rollout, RolloutInfo, SamplingParams, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

JUDGE_VERSION = 0
"""Weight version of a judge: that of its folder."""


class JudgeGroup(Service[EngineVerbs, Never, Never, None]):
    """The engines of one judge, which gateways ask."""

    def __init__(
        self, name: str, config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks
    ) -> None:
        self.config, self._placement, self._slots = judge_run(config, name), placement, placement.judges[name]
        self._num_gateways = scheduling.num_gateways(config)
        super().__init__(
            judges_kind(name),
            len(self._slots),
            tasks=tasks,
            log_folder=log_folder,
            deadline_s=config.deadlines.refit_s,
            start_s=start_deadline(self.config).seconds,
            # An engine answers a look after `LOOK_S`.
            look_s=LOOK_S + config.deadlines.generate_s,
        )

    async def _carry(self, index: int, requests: list[Never]) -> Mapping[str, Never]:
        raise AssertionError("gateways ask judges")

    def _launch(self, index: int) -> tuple[ActorHandle[EngineActor], ray.ObjectRef[None]]:
        place = self._placement, self._slots[index], self.log_file(index)
        return start_engine(self.config, *place, num_gateways=self._num_gateways, version=JUDGE_VERSION)


def start_judges(
    config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks
) -> Mapping[str, JudgeGroup]:
    """Starts the engines of all judges; does not wait for them."""
    return {name: JudgeGroup(name, config, placement, log_folder=log_folder, tasks=tasks) for name in config.judges}


logger = logging.getLogger(__name__)
T = TypeVar("T")

Handles = Sequence["ActorHandle[EngineActor]"]
# The actor gathers what ends within so long of the first.
GATHER_S = 0.05


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
    waiting: Mapping[str, tuple[int, str]]
    """Number of rollouts that wait for an agent that cannot be reached, and the reason, by the agent's name."""
    blocked: Mapping[str, str]
    """Lines at which an agent has blocked the others of its process, and the agent's name."""
    altered: Set[tuple[str, str]]
    """Agents, and what was altered in requests of theirs: see `AgentSession.altered`."""


class AgentRuns:
    """Rollouts of agents under way, and those that have ended, in `event_loop`."""

    def __init__(self, runner: AgentRunner) -> None:
        self.runner = runner
        self._work = ActorWork[AgentResult]()
        self._num_told = 0

    async def take(self, tasks: Sequence[AgentTask]) -> tuple[Progress, Packed]:
        """See `GatewayActor.run`."""
        for task in tasks:
            self._work.begin(self._run(task))
        ended = await self._work.take(ANSWER_S, gather_s=GATHER_S)
        gateway, rollouts = self.runner.gateway, list[Rollout]()
        infos = dict[str, tuple[list[RolloutInfo], Verdict, Sequence[int]]]()
        for request_id, ran in ended.items():
            infos[request_id] = summaries(ran.rollouts), ran.verdict, ran.engines
            rollouts += ran.rollouts
        num_answered, self._num_told = gateway.num_answered - self._num_told, gateway.num_answered
        waiting, blocked = self.runner.waiting(), self.runner.blocked()
        altered = frozenset(self.runner.altered)
        progress = Progress(infos, num_answered, gateway.engines.num_asked, waiting, blocked, altered)
        return progress, pack(rollouts)

    async def _run(self, task: AgentTask) -> None:
        self._work.answer(task.request_id, await self.runner.run(task))


class GatewayActor:
    """Serves clients and agents from an event loop in a thread; its calls come in threads of Ray's."""

    def __init__(self, config: RunConfig, index: int, num_gateways: int, log_file: Path) -> None:
        start_actor_process(log_file)
        self.config, self.index, self.num_gateways, self.log_file = config, index, num_gateways, log_file
        self._client, self._lines = (index, secrets.token_hex(8)), dict[Gateway, list[EngineLine]]()

    def ready(self, port: int | None, api_key: str, engines: Handles, judges: Mapping[str, Handles]) -> str:
        """Listens at `port`, or at any free one, and starts the agents; returns the gateway's URL."""
        given, hidden = split_secrets(self.config.policy.generation.vllm_cfg.env_vars or {}, self.config.facts.secrets)
        set_variables({**engine_variables(self.config, given), **hidden})
        # The driver holds this class too, and must not import vLLM.
        with importing():
            from mrl.rollout.serving import Handlers

        # What the config leaves open is as in the engines.
        gpu = local_gpu() if self.config.cluster.gpus_per_node else None
        handlers, host = Handlers(with_limits(self.config, gpu).policy), ray.util.get_node_ip_address()
        section = self.config.env
        if port is None and self.index == 0 and section.has_gym_servers:
            port = urlsplit(section.nemo_gym.policy_base_url or "").port  # which servers that run already ask
        generation = self.config.policy.generation
        ports = range(generation.port_range_low, generation.port_range_high) if port is None else range(port, port + 1)
        listener = listen(host, ports)
        url = f"http://{host}:{listener.getsockname()[1]}"
        of_judges = dict[str, Gateway]()
        for name, judge in self.config.judges.items():
            served = Handlers(with_limits(judge_run(self.config, name), gpu).policy)
            lines = EngineLines(self.index, judges_kind(name).name)
            of_judges[name] = Gateway(lines, served, api_key=api_key, max_model_len=judge.max_model_len, alias=name)
        gateway = Gateway(
            EngineLines(self.index),
            handlers,
            api_key=api_key,
            max_model_len=generation.vllm_cfg.max_model_len,
            model=self.config.policy.model_name,
            gym_key=section.nemo_gym.policy_api_key,
            timeout_s=section.agent_timeout_s,
            judges=of_judges,
        )
        runner = AgentRunner(
            gateway, url=url, timeout_s=section.agent_timeout_s, masks_flagged=section.should_mask_flagged_samples
        )
        self.runs = AgentRuns(runner)
        self.set_engines(engines, judges)
        place = self.index, self.num_gateways
        starting = started(runner, self.config, listener, place, log_file=self.log_file)
        self._serving = wait_in_loop(starting, start_s(self.config))
        return url

    def set_engines(self, handles: Handles, judges: Mapping[str, Handles]) -> None:
        """Sets the engines that answer now, and those of judges."""
        gateway = self.runs.runner.gateway
        in_loop(self._set_lines, gateway, handles)
        for name, of_judge in judges.items():
            in_loop(self._set_lines, gateway.judges[name], of_judge)

    def _set_lines(self, gateway: Gateway, handles: Handles) -> None:
        before = dict(enumerate(self._lines.get(gateway, ())))
        self._lines[gateway] = [
            line
            if (line := before.get(index)) is not None and line.handle == handle
            else EngineLine(ActorName(gateway.engines.name, index), handle, self._client)
            for index, handle in enumerate(handles)
        ]
        gateway.engines.set(self._lines[gateway])

    def run(self, tasks: Sequence[AgentTask]) -> tuple[Progress, Packed]:
        """Begins tasks; returns rollouts ended since the last call: metadata, payload. Waits up to `ANSWER_S` for one.

        A later call ends the wait of an earlier one. RuntimeError: a function cannot be loaded any more.
        """
        spans.begin("agents")
        answer = wait_in_loop(self.runs.take(tasks), ANSWER_S + STUCK_S)
        spans.end("agents")
        return answer

    def look(self) -> None:
        """Returns after a while, as a sign of life."""
        time.sleep(LOOK_S)

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(actor, *arguments)`: tests look inside with it."""
        return function(self, *arguments)


def gateways_of_agents(section: EnvConfig, num_gateways: int) -> dict[str, tuple[int, ...]]:
    """Gateway of each process of an agent, by the agent's name; all for an agent that has a URL."""
    found = dict[str, tuple[int, ...]]()
    for place, name in enumerate([*section.own.agents, *section.verifiers]):
        num_processes = (section.own.num_workers or 1) if name in section.own.agents else 1
        found[name] = tuple((place + process) % num_gateways for process in range(num_processes))
    return found | dict.fromkeys(section.remote, tuple(range(num_gateways)))


async def started(
    runner: AgentRunner, config: RunConfig, listener: socket.socket, place: tuple[int, int], *, log_file: Path
) -> asyncio.Task[None]:
    """Serves the runner's gateway, and starts its agents.

    `place` is the gateway's index among so many: each has its processes of functions, the first one NeMo Gym's servers.
    """
    (index, num_gateways), section = place, config.env
    counts = {name: places.count(index) for name, places in gateways_of_agents(section, num_gateways).items()}
    gateway, address, inherited = runner.gateway, listener.getsockname(), variables_of_children()
    for name, path in section.own.agents.items():
        runner.agents[name] = [FunctionAgent(path, log_name=log_file.name) for _ in range(counts[name])]
    runner.agents |= {name: [RemoteAgent(url)] for name, url in section.remote.items()}
    for name, python in section.verifiers.items():
        command, variables = command_of(name, section), variables_of(python, inherited)
        runner.agents[name] = [
            FunctionAgent(f"env.verifiers.{name}", command, variables, log_name=log_file.name)
            for _ in range(counts[name])
        ]
    server = make_server(gateway.app(), has_key=gateway.has_key, max_body=gateway.max_body)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    if section.has_gym_servers and index == 0:
        runner.gym = await rooms.reach_gym(
            section.nemo_gym,
            gateway_url=f"http://{address[0]}:{address[1]}",
            key=gateway.gym_key,
            host=address[0],
            folder=log_file.parent / "nemo_gym",
            judges=config.judges,
        )
    await asyncio.gather(*(agent.start() for agents in runner.agents.values() for agent in agents))
    return serving


class GatewayGroup(Service[GatewayActor, AgentTask, EndedRollout, str]):
    """The driver's handle on the gateways. `book` carries tasks; a dead one restarts at its address, asked again."""

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        engines: EngineGroup,
        judges: Mapping[str, JudgeGroup],
        *,
        log_folder: Path,
    ) -> None:
        self.config, self.placement, self.engines, self.judges = config, placement, engines, judges
        self.api_key = secrets.token_urlsafe(32)
        num_gateways = scheduling.num_gateways(config)
        self.urls = list[str]()
        """Address of each gateway, once they are built."""
        self._places = gateways_of_agents(config.env, num_gateways)
        self._waiting = [dict[str, tuple[int, str]]() for _ in range(num_gateways)]
        """Agents that each gateway waits for: see `Progress.waiting`."""
        self._altered: set[tuple[str, str]] = set()
        """Agents, and what was said to be altered in requests of theirs."""
        self._blocked: set[str] = set()
        """Lines that have been said to block."""
        self._traces = Traces("is not trained, as its agent raised")
        super().__init__(
            GATEWAYS,
            num_gateways,
            tasks=engines.tasks,
            log_folder=log_folder,
            deadline_s=config.deadlines.reward_s,
            start_s=start_s(config),
        )
        # Those that come back may have missed engines that have come back meanwhile.
        for service in (self, engines, *judges.values()):
            service.on_up = self.tell_engines

    def wait_until_built(self) -> None:
        """Waits until agents can be run. RuntimeError: a function cannot be loaded."""
        urls = self.wait_until_up()
        self.urls = [urls[index] for index in range(len(urls))]
        # Sessions that a client names are those of an engine's address.
        base_urls = [f"{self.urls[index % len(urls)]}/engines/{index}/v1" for index in range(self.engines.num_engines)]
        first, model = f"{self.urls[0]}/v1", self.config.policy.model_name
        judges = {name: [f"{url}{JUDGES}/{name}/v1" for url in self.urls] for name in self.judges}
        write_endpoints(self.log_folder, Endpoints(base_urls, self.api_key, model, first, self.api_key, judges))
        logger.info("Engines over HTTP: %s; the key stands in %s", ", ".join(base_urls), self.log_folder / FILE_NAME)
        for name, of_judge in judges.items():
            logger.info("Judge %s over HTTP: %s", name, ", ".join(of_judge))
        names = [
            *sorted(self.config.env.agents),
            *(["those of NeMo Gym's servers"] if self.config.env.has_gym_servers else []),
        ]
        if names:
            logger.info("Agents ask the gateway at %s: %s", ", ".join(self.urls), ", ".join(names))

    def does(self, env_name: str) -> bool:
        """True if an agent handles the rows of an environment."""
        return is_agent(env_name, self.config.env)

    def tell_engines(self) -> None:
        """Tells the gateways which engines there are, as they may have been started again."""
        for handle in self.handles:
            handle.set_engines.remote(*self._handles())

    def _handles(self) -> tuple[Handles, dict[str, Handles]]:
        return list(self.engines.handles), {name: list(judge.handles) for name, judge in self.judges.items()}

    async def run_agent(
        self, prompt: Prompt, rollout_index: int, epoch: int, seed: int, sampling: SamplingParams, weight_version: int
    ) -> EndedRollout:
        """Runs an agent on a row. NeMo Gym's servers ask the first gateway, which has the receipts."""
        task = AgentTask(prompt, rollout_index, epoch, seed, sampling, weight_version)
        return await self.book.ask(task.request_id, task, self._places.get(prompt.env_name, (0,)))

    async def _carry(self, index: int, requests: list[AgentTask]) -> dict[str, EndedRollout]:
        await self.up(index)
        progress: Progress
        progress, payload = await self._answer(self.handles[index].run, index, requests)
        self._say_waiting(index, progress.waiting)
        for agent, name in sorted(progress.altered - self._altered):
            logger.warning("%s (rollout/%s/%s)", altered_text(agent, name, self.config), agent, name)
        self._altered |= progress.altered
        for place in progress.blocked.keys() - self._blocked:
            self._blocked.add(place)
            way_out = "await what takes long, or call it by asyncio.to_thread"
            logger.warning(
                "Agent %s blocks all agents of its process: %s; %s", progress.blocked[place], safe_text(place), way_out
            )
        # While no engine is asked, agents work or are waited for, each until its own deadline: the run does not hang.
        if progress.num_answered or progress.ended or not progress.num_asked:
            self.tasks.tell(GENERATION)
        ended, place = dict[str, EndedRollout](), 0
        for request_id, (infos, verdict, engines) in progress.ended.items():
            found = [
                dataclasses.replace(info, payload=PayloadRef(payload, place + at)) for at, info in enumerate(infos)
            ]
            place += len(infos)
            ended[request_id] = EndedRollout(as_one(found), verdict, engines)
            self._traces.log(request_id, verdict, self.log_file(index), way_out="")
            self._traces.log_reason(request_id, verdict)
        return ended

    def waits(self) -> list[str]:
        """Sentences on agents that work or cannot be reached: `64 rollouts wait for agent sums: no connection`."""
        lost, names = self._waits(), [task.prompt.env_name for task in self.book.unanswered()]
        unreached = [f"{count} rollouts wait for {name}: {safe_text(reason)}" for name, (count, reason) in lost.items()]
        return [*unreached, *parts_at_work([name for name in names if f"agent {name}" not in lost], self.config.env)]

    def _waits(self) -> dict[str, tuple[int, str]]:
        """Number of rollouts that wait for an agent that cannot be reached, and a reason, by the agent's name."""
        found = dict[str, tuple[int, str]]()
        for name, (count, reason) in [item for one in self._waiting for item in one.items()]:
            found[name] = found.get(name, (0, ""))[0] + count, reason
        return found

    def _say_waiting(self, index: int, waiting: Mapping[str, tuple[int, str]]) -> None:
        before = self._waits().keys()
        self._waiting[index] = dict(waiting)
        limit, now = f"each at most {rounded(self.config.env.agent_timeout_s)} s (env.agent_timeout_s)", self._waits()
        for name, (count, reason) in now.items():
            if name not in before:
                logger.warning("%d rollouts wait for %s, %s: %s", count, name, limit, safe_text(reason))
        for name in before - now.keys():
            logger.info("No rollout waits for %s any more", name)

    def _launch(self, index: int) -> tuple[ActorHandle[GatewayActor], ray.ObjectRef[str]]:
        nodes = self.placement.first_slots
        options = {**self.placement.options(nodes[index % len(nodes)], {}), "max_concurrency": NUM_THREADS}
        actor = start_actor(GatewayActor, options, self.config, index, len(self._waiting), self.log_file(index))
        port = int(self.urls[index].rpartition(":")[2]) if self.urls else None
        return actor, ask(actor, GatewayActor.ready, port, self.api_key, *self._handles())


def altered_text(agent: str, name: str, config: RunConfig) -> str:
    """Explains an entry of `AgentSession.altered`, with the way out."""
    kind, _, part = name.partition("_")
    if kind == "overridden":
        return f"Agent {agent} asks for a {part} of its own; the run's is used, so that trained tokens are its policy's"
    lost = "tools" if part == "tools" else f"a part of its requests, {part}"
    return (
        f"Agent {agent} sends {lost}, which the chat template of {config.policy.tokenizer.name} does not write: the "
        f"model does not see it. Say it in a message, or set {CHAT_KEY}.chat_template to one that writes it"
    )


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
        # One in which nothing was sampled has a stand-in.
        num_turns=sum(one.num_turns for one in sequences if one.finish_reason != "abort"),
        finish_reason="length" if any(one.finish_reason == "length" for one in sequences) else first.finish_reason,
        further=tuple(dataclasses.replace(one, place=place) for place, one in enumerate(others, 1)),
    )


async def start_gateways(
    config: RunConfig,
    placement: Placement,
    engines: EngineGroup,
    judges: Mapping[str, JudgeGroup],
    *,
    log_folder: Path,
) -> GatewayGroup | None:
    """The gateways, once the engines are up, if the config names agents or judges, or wants engines to answer HTTP."""
    if not scheduling.num_gateways(config):
        return None
    for judge in judges.values():
        await in_worker(judge.wait_until_up)
    gateways = GatewayGroup(config, placement, engines, judges, log_folder=log_folder)
    await in_worker(gateways.wait_until_built)
    return gateways
