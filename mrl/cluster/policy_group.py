"""The policy ranks as Ray actors, and the driver's handle on all of them."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import ray

from conversion.cache import check_entry
from conversion.files.canary import answer_canary
from mrl import env
from mrl.capacity.start_deadline import start_deadline
from mrl.cluster.environment import policy_variables
from mrl.cluster.lifetime import start_actor_process
from mrl.cluster.model_cache import StartingWeights, check_shared, starting_weights
from mrl.cluster.payload import pull
from mrl.cluster.placement import Placement
from mrl.cluster.waiting import Background, wait_all
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import split_secrets
from mrl.data.packing import PackedRow, RowSequence, pack_row
from mrl.types import Batch, TrainSequence

logger = logging.getLogger(__name__)

RankRows = tuple[tuple[int, ...], ...]
"""Rows of one dp rank, as indices into the batch."""


class PolicyActor:
    """One policy rank in its own process. Every method runs `mrl.policy.policy.Policy`'s method of the same name."""

    def __init__(self, log_file: Path, secrets: Mapping[str, str]) -> None:
        start_actor_process(log_file, secrets)

    def address(self, ports: range) -> tuple[str, int]:
        """Node address and a free port, for rank 0's rendezvous; see `free_port`."""
        return ray.util.get_node_ip_address(), free_port(ports)

    def build(self, config: RunConfig, rank: int, world_size: int, master: tuple[str, int], pad_token_id: int) -> int:
        """Builds the rank, its weights still random. Collective over all ranks. Returns the data-parallel rank."""
        # Imported here: the driver holds this class too, and must not import megatron.
        from mrl.policy.policy import Policy

        self.config = config
        self.pad_token_id = pad_token_id
        address, port = master
        self.policy = Policy(
            config, rank=rank, world_size=world_size, master_address=address, master_port=port, timeout_s=config.deadlines.train_s
        )
        self.part = (rank, world_size)
        return self.policy.dp_rank

    def answer_canary(self, canary: Path, answer: str, patience_s: float) -> tuple[str, bool]:
        """This node's address, and whether this process finds the driver's canary. See `mrl.cluster.model_cache`."""
        return ray.util.get_node_ip_address(), answer_canary(canary, answer, patience_s=patience_s)

    def check_cached_model(self, folder: Path) -> None:
        """Checks this rank's part of the files of a cached checkpoint. See `conversion.cache.check_entry`."""
        part, num_parts = self.part
        check_entry(folder, part=part, num_parts=num_parts)

    def set_batch(self, sequences: dict[int, TrainSequence], rows: RankRows, logprob_rows: RankRows, is_further: bool) -> int:
        """Pulls the payloads of this rank's sequences and packs them; returns the number of rows. See `Policy.set_batch`."""
        payload = pull([sequence.rollout for sequence in sequences.values()], timeout_s=self.config.deadlines.train_s)
        pulled = {
            index: RowSequence(index, rollout, sequence.advantage, sequence.is_valid, sequence.reward, sequence.fixed_advantages)
            for (index, sequence), rollout in zip(sequences.items(), payload, strict=True)
        }
        packed = self._pack(pulled, rows)
        self.policy.set_batch(packed, packed if logprob_rows == rows else self._pack(pulled, logprob_rows), is_further=is_further)
        return len(packed)

    def _pack(self, pulled: dict[int, RowSequence], rows: RankRows) -> list[PackedRow]:
        return [
            pack_row(
                [pulled[index] for index in row],
                divisible_by=self.config.policy.row_multiple,
                sequence_multiple=self.config.policy.sequence_multiple,
                pad_token_id=self.pad_token_id,
            )
            for row in rows
        ]

    def call(self, method: str, *arguments: object) -> object:
        """Calls a method of the policy by name, so that every verb of the policy need not be spelled twice."""
        return getattr(self.policy, method)(*arguments)

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(policy, *arguments)`: tests and diagnostics reach into a rank with it."""
        return function(self.policy, *arguments)


def free_port(ports: range) -> int:
    """A port of this host that nobody listens at: one of `ports`, or any if that is empty.

    Raises:
        RuntimeError: all of them are taken.
    """
    # Runs that start at the same time would all try the first one.
    for port in random.sample(ports, len(ports)) or [0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise RuntimeError(f"no free port from {ports.start} to {ports.stop - 1} (cluster.master_port_range_low and _high); widen the range")


class PolicyGroup:
    """All policy ranks. Its methods are collective: every rank is called, and the first failure ends the wait.

    `beside`, if there is any, goes on while the driver waits for the ranks.
    """

    def __init__(self, config: RunConfig, placement: Placement, *, pad_token_id: int, log_folder: Path) -> None:
        self.start_s, self.train_s = start_deadline(config).seconds, config.deadlines.train_s
        self.beside: Background | None = None
        self.world_size = placement.num_policy_ranks
        actor_class = ray.remote(PolicyActor)
        given, secrets = split_secrets(config.policy.megatron_cfg.env_vars or {})
        options = [
            placement.options(rank, policy_variables(config, {"OMP_NUM_THREADS": str(placement.num_threads(rank))} | given))
            for rank in range(self.world_size)
        ]
        self.actors = [
            actor_class.options(**options[rank]).remote(log_folder / f"policy-rank-{rank}.log", secrets) for rank in range(self.world_size)
        ]
        first = wait_all(
            {"policy rank 0": self.actors[0].address.remote(config.cluster.master_ports)}, deadline_s=self.start_s, what="start"
        )
        self.master = cast(tuple[str, int], first["policy rank 0"])
        root = env.cache_root()
        if root is not None:
            check_shared(root, self.actors, deadline_s=self.start_s)
        building = [actor.build.remote(config, rank, self.world_size, self.master, pad_token_id) for rank, actor in enumerate(self.actors)]
        # The first use of a model converts it here in the driver, while the ranks are being built.
        with starting_weights(Path(config.policy.model_name), root, config.policy.megatron_cfg.parallel) as weights:
            self.dp_ranks = cast(list[int], self._wait(building, "build of the model", self.start_s))
            self._load(weights)

    def _load(self, weights: StartingWeights) -> None:
        if weights.cached is None:
            self.call("load_hf", weights.hf, deadline_s=self.start_s)
            return
        weights.repair_unless(self._check_cached_model)
        self.call("load_mcore", weights.cached, deadline_s=self.start_s)

    def _check_cached_model(self, folder: Path) -> None:
        self._wait([actor.check_cached_model.remote(folder) for actor in self.actors], "check of the cached model", self.start_s)

    def call(self, method: str, *arguments: object, deadline_s: float) -> list[object]:
        """`Policy.<method>(*arguments)` on every rank; results by rank."""
        return self._wait([actor.call.remote(method, *arguments) for actor in self.actors], method, deadline_s)

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]], *, deadline_s: float) -> list[object]:
        """`Policy.<method>` with arguments of its own for each rank; results by rank."""
        return list(wait_all(self.start_each(method, arguments), deadline_s=deadline_s, what=method).values())

    def start_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> dict[str, ray.ObjectRef]:
        """Starts `Policy.<method>` with arguments of its own for each rank; what to wait for, by name."""
        calls = zip(self.actors, arguments, strict=True)
        return {f"policy rank {rank}": actor.call.remote(method, *mine) for rank, (actor, mine) in enumerate(calls)}

    def apply(self, function: Callable[..., object], *arguments: object, deadline_s: float) -> list[object]:
        """`function(policy, *arguments)` on every rank; results by rank."""
        return self._wait([actor.apply.remote(function, *arguments) for actor in self.actors], "apply", deadline_s)

    def set_batch(self, batch: Batch, *, is_further: bool = False) -> None:
        """Tells every rank which rollouts are its own; the ranks pull the payloads themselves. See `Policy.set_batch`."""
        sequences = [{index: batch.sequences[index] for row in rows for index in row} for rows in batch.rows]
        references = [
            actor.set_batch.remote(sequences[dp_rank], batch.rows[dp_rank], batch.logprob_rows[dp_rank], is_further)
            for actor, dp_rank in zip(self.actors, self.dp_ranks, strict=True)
        ]
        self._wait(references, "set_batch", self.train_s)

    def _wait(self, references: Sequence[ray.ObjectRef], what: str, deadline_s: float) -> list[object]:
        pending = {f"policy rank {rank}": reference for rank, reference in enumerate(references)}
        return list(wait_all(pending, deadline_s=deadline_s, what=what, beside=self.beside).values())
