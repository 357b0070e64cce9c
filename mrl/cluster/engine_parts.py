# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine on more nodes. The engine's actor, on the first node, owns their actors, and they end together."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from mrl import numa
from mrl.cluster.calls import ask, start_actor
from mrl.cluster.environment import importing, own_temporary_folder, start_actor_process
from mrl.cluster.policies import hold_port
from mrl.cluster.scheduling import num_gateways
from mrl.config.held_adapters import held_adapters
from mrl.config.schema.run import RunConfig
from mrl.plan.deadlines import start_deadline
from mrl.rollout.environment import EngineNodes

if TYPE_CHECKING:
    from ray.actor import ActorHandle


logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""A part runs as long as its engine: the wait for its end begins anew after this long."""


@dataclass(frozen=True)
class EnginePart:
    """A further node of an engine: the options and the log of its actor, and the GPUs of its workers."""

    options: Mapping[str, object]
    log_file: Path
    device_ids: tuple[int, ...]


class EnginePartActor:
    def __init__(self, log_file: Path, secrets: Mapping[str, str]) -> None:
        start_actor_process(log_file, secrets)

    def run(self, config: RunConfig, device_ids: Sequence[int], nodes: EngineNodes) -> None:
        """Runs the workers of this node; ends as soon as one of them ends."""
        self._temporary = own_temporary_folder()
        if device_ids and config.cluster.bind_to_numa:
            logger.info("%s", numa.bind(numa.gpu_nodes(device_ids)))
        meet_at_the_first_node()
        with importing():
            from mrl.rollout.engine import run_part

        run_part(nodes=nodes, device_ids=device_ids, **engine_settings(config))


class EngineParts:
    """The actors of an engine's further nodes. Ray ends them with this process, which owns them."""

    def __init__(self, config: RunConfig, parts: Sequence[EnginePart], secrets: Mapping[str, str]) -> None:
        """Starts the actors; all workers meet at a store of this process, which ends if one of the actors does."""
        from torch.distributed import TCPStore

        meet_at_the_first_node()
        address = ray.util.get_node_ip_address()
        held = hold_port(config.cluster.master_ports, address)
        port = held.getsockname()[1]
        self.nodes = EngineNodes(len(parts) + 1, 0, address, port)
        limit = timedelta(seconds=start_deadline(config).seconds)
        # vLLM's first worker would listen at the port itself, long after it was found free.
        self._store = TCPStore(
            address, port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=held.detach()
        )
        self._actors: list[ActorHandle[EnginePartActor]] = []
        for rank, part in enumerate(parts, start=1):
            nodes = EngineNodes(self.nodes.count, rank, self.nodes.address, self.nodes.port)
            self._actors.append(start_actor(EnginePartActor, part.options, part.log_file, secrets))
            running = ask(self._actors[-1], EnginePartActor.run, config, part.device_ids, nodes)
            threading.Thread(target=end_with_part, args=(running, part.log_file), daemon=True).start()


def end_with_part(running: ray.ObjectRef[None], log_file: Path) -> None:
    """Waits until a part ends, then ends this process and its workers: only as a whole can an engine restart."""
    from mrl.rollout.engine import end_engine

    while not ray.wait([running], timeout=LOOK_S)[0]:
        pass
    try:
        ray.get(running, timeout=LOOK_S)
    except RayError as error:
        end_engine(f"The engine's part on another node ended, see {log_file}: {' '.join(str(error).split())}")


def meet_at_the_first_node() -> None:
    """Makes this node's workers use the store of the engine's process, and listen at the node's cluster address."""
    # torch's name for a store that somebody else holds; without it worker 0 makes one.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # vLLM would guess the address by a route to the Internet.
    os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())


def engine_settings(config: RunConfig) -> dict:
    """Arguments that an engine and its parts on further nodes share."""
    generation = config.policy.generation
    return dict(
        model_dir=config.policy.model_name,
        config=generation,
        seed=config.rollouts.seed,
        keeps_routes=config.policy.router_replay.enabled,
        tokenizer=config.policy.tokenizer.name if generation.stop_strings or num_gateways(config) else None,
        adapters=held_adapters(config.policy),
    )
