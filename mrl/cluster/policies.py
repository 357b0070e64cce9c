# SPDX-License-Identifier: Apache-2.0
"""Policy ranks as Ray actors, the driver's handles on their models, and the starting weights from the shared cache."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray

from conversion.cache import cached_mcore, check_entry, discard, mcore_in_use, read_entry, root_of
from conversion.families.common import MegatronParallel
from conversion.files.owners import PATIENCE_S, answer_canary, is_answered, release_canary, retire_canary
from mrl import env, numa, spans, startup
from mrl.cluster.calls import Actors, ask, put, start_actor, wait_all
from mrl.cluster.environment import importing, policy_variables, start_actor_process
from mrl.cluster.errors import ActorName
from mrl.cluster.payload import Packed, pack, pull, pull_arrays, pull_teacher, put_arrays
from mrl.cluster.runtime import Placement
from mrl.cluster.verbs import PolicyVerbs, TokenVerb
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import split_secrets
from mrl.data.batch import make_batch
from mrl.data.packing import PackedRow, pack_row, with_prompt
from mrl.data.prefixes import add_trees
from mrl.envs.scratch import Scratch
from mrl.phases import ModelName, role_of
from mrl.plan.deadlines import start_deadline, train_deadline
from mrl.types import Batch, PayloadRef, TrainSequence

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEETING_FILE = "ranks"
RankRows = tuple[tuple[int, ...], ...]
"""Rows of one dp rank, as indices into the batch."""


class PolicyActor:
    """One policy rank: the policy and further models, which the driver reaches by name."""

    def __init__(self, log_file: Path, secrets: Mapping[str, str]) -> None:
        start_actor_process(log_file, secrets)
        self.models: dict[ModelName, PolicyRank] = {}
        self.listener: socket.socket | None = None

    def address(self, ports: range) -> tuple[str, int]:
        """Address at which all ranks meet this one; keeps the port until then."""
        self.listener = hold_port(ports, host := ray.util.get_node_ip_address())
        return host, self.listener.getsockname()[1]

    def build(
        self,
        config: RunConfig,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        pad_token_id: int,
        model: ModelName = "policy",
    ) -> int:
        """Builds a model of the rank with random weights. Collective over all ranks. Returns the data-parallel rank."""
        if config.cluster.gpus_per_node and "TORCH_EXTENSIONS_DIR" not in os.environ:
            # For what Megatron compiles in a backward pass. In a shared folder a rank that is killed meanwhile leaves a
            # lock for ever.
            self._extensions = Scratch()
            os.environ["TORCH_EXTENSIONS_DIR"] = str(self._extensions.path)
        if config.cluster.gpus_per_node and config.cluster.bind_to_numa and not self.models:
            logger.info("%s", numa.bind(numa.gpu_nodes([rank % config.cluster.gpus_per_node])))
        # Imported here: the driver holds this class too, and must not import megatron.
        with importing():
            from mrl.policy.megatron_import import import_megatron

            import_megatron(rank % max(config.cluster.gpus_per_node, 1))
            from mrl.policy.parallel import Meeting
            from mrl.policy.policy import PolicyRank

        self.config = config
        self.pad_token_id = pad_token_id
        self.part = (rank, world_size)
        self.timeout_s = train_deadline(config).seconds
        with spans.span("build"):
            meeting = Meeting(*master, self.listener)
            self.listener = None
            self.models[model] = PolicyRank(
                config, rank=rank, world_size=world_size, meeting=meeting, timeout_s=self.timeout_s, model=model
            )
        return self.models[model].dp_rank

    def answer_canary(self, canary: Path, answer: str, patience_s: float) -> tuple[str, bool]:
        """This node's address, and whether this process finds the driver's canary; see `check_shared`."""
        return ray.util.get_node_ip_address(), answer_canary(canary, answer, patience_s=patience_s)

    def check_cached(self, folder: Path) -> None:
        """Checks this rank's part of the files of a cached checkpoint."""
        check_entry(folder, part=self.part[0], num_parts=self.part[1])

    def set_batch(
        self,
        model: ModelName,
        sequences: dict[int, TrainSequence],
        rows: RankRows,
        logprob_rows: RankRows,
        is_further: bool,
        shares_prefixes: bool,
        prompts: Mapping[int, tuple[int, ...]],
    ) -> int:
        """Pulls payloads of this rank's sequences and packs them; returns the row count. See `PolicyRank.set_batch`.

        `prompts`: tokens in place of a sequence's own prompt, by index.
        """
        start = time.monotonic()
        spans.begin("set_batch")
        payload = pull([sequence.rollout for sequence in sequences.values()], timeout_s=self.timeout_s)
        teachers = pull_teacher(list(sequences.values()), timeout_s=self.timeout_s)
        pulled = {}
        for (index, sequence), rollout, teacher in zip(sequences.items(), payload, teachers, strict=True):
            shown = with_prompt(rollout, prompts[index]) if index in prompts else rollout
            pulled[index] = replace(sequence, rollout=replace(sequence.rollout, payload=shown), teacher=teacher)
        policy = self.config.model(model)
        sizes = {
            "divisible_by": policy.row_multiple,
            "sequence_multiple": policy.sequence_multiple,
            "pad_token_id": self.pad_token_id,
        }

        def pack_rows(wanted: RankRows) -> list[PackedRow]:
            packed = [pack_row({index: pulled[index] for index in row}, **sizes) for row in wanted]
            if shares_prefixes:
                add_trees(packed, divisible_by=policy.row_multiple)
            return packed

        packed = pack_rows(rows)
        self.models[model].set_batch(
            packed, packed if logprob_rows == rows else pack_rows(logprob_rows), is_further=is_further
        )
        spans.add("set_batch", start, rows=len(packed))
        return len(packed)

    def call_on_tokens(
        self, model: ModelName, verb: str, given: Sequence[Mapping[int, PayloadRef]] | None
    ) -> list[dict[int, PayloadRef]]:
        """Calls one of `ON_TOKENS` with arrays by batch and sequence; those that it returns stay here until pulled."""
        from mrl.policy.other_models import ON_TOKENS

        arguments = () if given is None else (pull_arrays(given, timeout_s=self.timeout_s),)
        return put_arrays(self._spanned(model, verb, partial(ON_TOKENS[verb], self.models[model]), *arguments) or [])

    def teach(self, model: ModelName, k: int) -> tuple[list[int], Packed]:
        """Indices of the sequences of this rank, and their teacher outputs; see `mrl.policy.other_models.teach`."""
        from mrl.policy.other_models import teach

        found = self._spanned(model, "teacher", teach, self.models[model], k)
        return list(found), pack(found.values())

    def call(self, model: ModelName, verb: str, *arguments: object) -> object:
        verbs: PolicyVerbs = self.models[model]
        return self._spanned(model, spans.name_of(verb, *arguments), getattr(verbs, verb), *arguments)

    def _spanned(self, model: ModelName, name: str, function: Callable[..., T], *arguments: object) -> T:
        from torch.profiler import record_function

        start = time.monotonic()
        spans.begin(name, str(self.models[model].phase))
        with record_function(name):
            answer = function(*arguments)
        facts = spans.memory_facts() if time.monotonic() - start > spans.MIN_MEASURED_S else {}
        spans.add(name, start, phase=str(self.models[model].phase), **facts)
        return answer

    def apply(self, model: ModelName, function: Callable[..., T], *arguments: object) -> T:
        self.models[model].make_current()
        return function(self.models[model], *arguments)


def hold_port(ports: range, host: str) -> socket.socket:
    """A socket bound to a free port of `host`, of `ports`, or any if empty. RuntimeError: all are taken.

    `host` is the node's address in the cluster: a store of torch knows no secret, and other networks need not reach it.
    """
    # Runs that start at the same time would all try the first one.
    for port in random.sample(ports, len(ports)) or [0]:
        held = socket.socket()
        try:
            held.bind((host, port))
            return held
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise RuntimeError(
                    f"this node's address in the Ray cluster, {host}, is that of none of its network interfaces; start "
                    "its Ray with --node-ip-address=ADDRESS of one that the other nodes reach"
                ) from error
    where = f"from {ports.start} to {ports.stop - 1} on {host}"
    raise RuntimeError(f"no free port {where} (cluster.master_port_range_low and _high); widen the range")


class Ranks:
    """The processes of all policy ranks, and the address at which they meet. They hold no model yet."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path, own: ModelName = "") -> None:
        """`own`: a model with nodes of its own, whose ranks these are, in place of the policy's."""
        slots = placement.own_slots[own] if own else range(placement.num_policy_ranks)
        role = role_of(own or "policy")
        same = [other.start for model, other in placement.own_slots.items() if role_of(model) == role]
        self.kind, self.first = f"{role} rank", slots.start - min(same, default=0)
        """Name of a rank, and number of the first: those of all models of a role are counted in one."""
        self.start_s = start_deadline(config).seconds
        self.handles: list = []
        given, secrets = split_secrets(config.model(own or "policy").megatron_cfg.env_vars or {}, config.facts.secrets)
        for number, slot in enumerate(slots, self.first):
            threads = {"OMP_NUM_THREADS": str(placement.num_threads(slot))}
            variables = policy_variables(config, threads | given, own or "policy")
            log_file = log_folder / f"{self.kind.replace(' ', '-')}-{number}.log"
            self.handles.append(start_actor(PolicyActor, placement.options(slot, variables), log_file, secrets))
        if config.cluster.num_nodes == 1:
            self.master = str(placement.folder / MEETING_FILE), 0
        else:
            master = {
                ActorName(self.kind, self.first): ask(self.handles[0], PolicyActor.address, config.cluster.master_ports)
            }
            (self.master,) = wait_all(master, deadline_s=self.start_s, what="start").values()
        if (root := env.cache_root()) is not None:
            check_shared(root, self.handles, deadline_s=self.start_s)


class PolicyGroup(Actors[PolicyVerbs]):
    """One model of all policy ranks. Calls are collective: every rank is called; the first failure ends the wait."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, pad_token_id: int, model: ModelName = "policy") -> None:
        """Builds the model on every rank and loads its starting weights. Every rank builds its models in one order."""
        super().__init__(ranks.kind, deadline_s=train_deadline(config).seconds, target=(model,), first=ranks.first)
        self.model: ModelName = model
        self.config, self.pad_token_id = config, pad_token_id
        section = config.model(model)
        self.start_s = ranks.start_s
        self.handles, self.master, self.world_size = ranks.handles, ranks.master, len(ranks.handles)
        building = {
            self.name(rank): ask(
                actor, PolicyActor.build, config, rank, self.world_size, self.master, pad_token_id, model
            )
            for rank, actor in enumerate(self.handles)
        }
        hf, parallel, root = Path(section.model_name), section.megatron_cfg.parallel, env.cache_root()
        # The first use of a model converts it here in the driver, while the ranks are being built. The checkpoint is
        # cut for the ranks of this run: each checks and reads a file of its own.
        with nullcontext() if root is None else mcore_in_use(hf, root, parallel=parallel) as cached:
            self.dp_ranks = list(self.wait(building, deadline_s=self.start_s, what="build of the model").values())
            startup.lap("build")
            self.load(hf, cached, parallel)
            startup.lap("load")
        self.device = self.call(PolicyVerbs.device_name, only=[0])[0]

    def load(self, hf: Path, cached: Path | None, parallel: MegatronParallel) -> None:
        """Loads each rank's part of the starting weights from the cached checkpoint, repaired if damaged, or `hf`."""
        if cached is None:
            self.call(PolicyVerbs.load_hf, hf, deadline_s=self.start_s)
        else:
            repair_unless(self._check_cached, hf, cached, parallel)
            self.call(PolicyVerbs.load_mcore, cached, deadline_s=self.start_s)

    def _check_cached(self, folder: Path) -> None:
        pending = {
            self.name(rank): ask(actor, PolicyActor.check_cached, folder) for rank, actor in enumerate(self.handles)
        }
        self.wait(pending, deadline_s=self.start_s, what="check of the cached model")

    def set_batches(self, batches: Sequence[Batch], prompts: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Sets batches of a step's updates in order. Each rank pulls its rows' payloads; see `PolicyActor.set_batch`.

        `prompts`, of a single batch, are those that this model sees in place of the rollouts' own.
        """
        assert not prompts or len(batches) == 1
        for position, batch in enumerate(batches):
            sequences = [put({index: batch.sequences[index] for row in rows for index in row}) for rows in batch.rows]
            pending = {}
            for rank, dp_rank in enumerate(self.dp_ranks):
                mine = (
                    cast("dict[int, TrainSequence]", sequences[dp_rank]),
                    batch.rows[dp_rank],
                    batch.logprob_rows[dp_rank],
                    position > 0,
                    batch.shares_prefixes,
                    {
                        index: prompts[index]
                        for row in batch.rows[dp_rank]
                        for index in row
                        if prompts and index in prompts
                    },
                )
                pending[self.name(rank)] = ask(self.handles[rank], PolicyActor.set_batch, self.model, *mine)
            self.wait(pending, deadline_s=None, what="set_batch")

    def start_on_tokens(
        self, verb: TokenVerb, batches: Sequence[Batch], given: Mapping[int, PayloadRef] | None = None
    ) -> Callable[[], dict[int, PayloadRef]]:
        """Starts a function that takes or returns arrays of sequences, which move between ranks; here are references.

        The answer waits for it.
        """
        firsts = list(accumulate([0, *(len(batch.sequences) for batch in batches)]))

        def part(dp_rank: int) -> list[dict[int, PayloadRef]] | None:
            if given is None:
                return None
            return [
                {index: given[first + index] for row in batch.rows[dp_rank] for index in row}
                for first, batch in zip(firsts, batches, strict=False)
            ]

        pending = {
            self.name(rank): ask(self.handles[rank], PolicyActor.call_on_tokens, self.model, verb, part(dp_rank))
            for rank, dp_rank in enumerate(self.dp_ranks)
        }

        def finish() -> dict[int, PayloadRef]:
            return {
                first + index: payload
                for answer in self.wait(pending, deadline_s=None, what=verb).values()
                for first, payloads in zip(firsts, answer, strict=False)
                for index, payload in payloads.items()
            }

        return finish

    def teach(
        self, sequences: Sequence[TrainSequence], prompts: Mapping[int, tuple[int, ...]], k: int
    ) -> Callable[[], list[TrainSequence]]:
        """Starts this model on generated tokens. The answer waits, and gives the sequences with references to outputs.

        `prompts`: tokens that this model sees in place of a sequence's own prompt, by index. See
        `mrl.policy.other_models.teach`.
        """
        shown = [
            replace(sequence, rollout=replace(sequence.rollout, prompt_length=len(prompts[index])))
            if index in prompts
            else sequence
            for index, sequence in enumerate(sequences)
        ]
        self.set_batches([make_batch(shown, self.config, self.model)], prompts)
        pending, payloads = {}, {}
        for rank, actor in enumerate(self.handles):
            pending[self.name(rank)], payloads[rank] = actor.teach.options(num_returns=2).remote(self.model, k)

        def finish() -> list[TrainSequence]:
            taught = list(sequences)
            for rank, indices in self.wait(pending, deadline_s=None, what="teach").items():
                for place, index in enumerate(indices):
                    taught[index] = replace(sequences[index], teacher=PayloadRef(payloads[rank], place))
            assert all(sequence.teacher is not None for sequence in taught), (
                "sequences of which no rank of the teacher has answered"
            )
            return taught

        return finish


def convert_if_new(config: RunConfig) -> None:
    """Converts the run's models into the cache if missing, while engines start; `PolicyGroup` would do it later."""
    if (root := env.cache_root()) is not None:
        for section in config.models.values():
            cached_mcore(Path(section.model_name), root, parallel=section.megatron_cfg.parallel)


def repair_unless(check: Callable[[Path], None], hf: Path, cached: Path, parallel: MegatronParallel) -> None:
    """Returns once `check` finds a model's cached checkpoint whole; if it raises ValueError, converts it once more."""
    seen = read_entry(cached.parent)
    try:
        check(cached)
    except ValueError as error:
        logger.warning("The cached model is damaged and is converted again: %s", error)
        discard(cached, seen)
        cached_mcore(hf, root_of(cached), parallel=parallel)
        check(cached)


def check_shared(root: Path, actors: list, *, deadline_s: float, patience_s: float = PATIENCE_S) -> None:
    """Raises unless every actor (by `PolicyActor.answer_canary`) and this process see each other's files in `root`."""
    canary, reason = release_canary(root), ""
    try:
        pending = {
            f"{index}": ask(actor, PolicyActor.answer_canary, canary, f"{index}", patience_s)
            for index, actor in enumerate(actors)
        }
        answers = wait_all(pending, deadline_s=deadline_s + patience_s, what="look at the shared cache")
        for name, (node, has_found) in answers.items():
            if not has_found:
                reason = f"node {node} cannot see {canary}, or cannot write next to it"
            elif not is_answered(canary, name, patience_s=patience_s):
                reason = f"the node of the driver cannot see what node {node} wrote next to {canary}"
            if reason:
                raise RuntimeError(
                    f"{root}: this cache is not shared: {reason}; set {env.MRL_CACHE.name} to a folder that all "
                    f"nodes share, or {env.MRL_CACHE.name}=off to read the Hugging Face files directly"
                )
    finally:
        retire_canary(canary)
