# SPDX-License-Identifier: Apache-2.0
"""The driver of a large run, with all of its code, and stand-ins that answer at once for ranks, engines and rewards.

Ray is real. A process stands for many actors; what the driver sends each of them, and how often, is counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from conversion.families.common import MegatronCoords, MegatronParallel
from mrl.cluster.engines import Polled
from mrl.cluster.payload import Packed, pack
from mrl.cluster.rewards import Judged, Unjudged
from mrl.cluster.runtime import ray_runtime
from mrl.cluster.scheduling import engine_slots, own_slots
from mrl.config.load import load_run
from mrl.config.schema.run import ClusterConfig, RunConfig
from mrl.data.turns import Ending
from mrl.envs.scorer import RewardLoad
from mrl.loop import rollouts
from mrl.loop.run import Budget, Run
from mrl.metrics import EngineWork
from mrl.recipes import tokenizer
from mrl.refit.exchange import GpuHandles
from mrl.refit.pull import VerifyReport
from mrl.store.run_folder import RunFolder
from mrl.types import Rollout, RolloutInfo, RolloutRequest, TokenSample, TrainSequence, Verdict
from tests.drivers import do, opened

MODEL = Path(__file__).parents[2] / "scripts" / "bench" / "models" / "nemotron3_nano_30b_a3b.config.json"
NUM_GENERATIONS = 16
# Those of the console, and as many more as an update of Nano has.
TRAIN_METRICS = (
    *(f"train/{name}" for name in ("loss", "kl_penalty", "grad_norm", "mean_abs_dlogp", "token_mult_prob_error")),
    *(f"train/metric_{index}" for index in range(60)),
)
SAMPLED_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """A run to rehearse."""

    num_ranks: int
    num_rollouts: int
    num_tokens: int = 4096
    """Tokens of a rollout, as its metadata say."""
    payload_tokens: int = 16
    """Tokens of a rollout, as its payload holds."""
    text_characters: int = 200
    words: tuple[str, ...] = ()
    """Further overrides of the config."""


def rehearsal_config(shape: Shape, folder: Path) -> RunConfig:
    """The config of a run of Nano with 8 GPUs a node, and in `folder` the files that its driver reads."""
    model, data = folder / "model", folder / "train.jsonl"
    if not model.exists():
        tokenizer.save(model, model_max_length=2**20)
        shutil.copy(MODEL, model / "config.json")
        (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        row = {"input": "How many? " + "?" * 300, "output": "42"}
        data.write_text(
            "".join(json.dumps(row) + "\n" for _ in range(4 * shape.num_rollouts // NUM_GENERATIONS)), encoding="utf-8"
        )
    words = [
        f"policy.model_name={model}",
        f"data.train.data_path={data}",
        f"data.validation.data_path={data}",
        f"checkpointing.checkpoint_dir={folder / 'run'}",
        f"grpo.num_prompts_per_step={shape.num_rollouts // NUM_GENERATIONS}",
        f"policy.max_total_sequence_length={2 * shape.num_tokens}",
        f"policy.sequence_packing.train_mb_tokens={2 * shape.num_tokens}",
        f"policy.sequence_packing.logprob_mb_tokens={2 * shape.num_tokens}",
        "policy.precision=bfloat16",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.megatron_cfg.context_parallel_size=4",
        "policy.megatron_cfg.expert_model_parallel_size=8",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
        # Stand-ins compute nothing that could be compared.
        "policy.generation.compare_at_start=false",
        "cluster.gpus_per_node=8",
        f"cluster.num_nodes={shape.num_ranks // 8}",
        "grpo.val_at_start=false",
        "checkpointing.enabled=false",
        "logger.tensorboard_enabled=false",
    ]
    return load_run("grpo_tiny.yaml", [*words, *shape.words])[0]


class PolicyStandIn:
    """Answers as one policy rank."""

    def __init__(self, index: int, shape: Shape) -> None:
        self.index = index

    def address(self, ports: range) -> tuple[str, int]:
        return "127.0.0.1", 1

    def build(
        self, config: RunConfig, rank: int, world_size: int, master: tuple[str, int], pad_token_id: int, model: str
    ) -> int:
        parallel = config.policy.megatron_cfg.parallel
        self.place: tuple[MegatronParallel, MegatronCoords, str, str] = (
            parallel,
            parallel.coords_of(rank, world_size),
            config.policy.precision,
            "te",
        )
        return rank // (parallel.tp * parallel.cp) % config.data_parallel_size

    def set_batch(self, model: str, sequences: dict[int, TrainSequence], *of_the_batch: object) -> int:
        return len(sequences)

    def call(self, model: str, verb: str, *arguments: object) -> object:
        if verb == "layout_arguments":
            return self.place
        if verb == "device_name":
            return "stand-in"
        if verb == "prepare_refit":
            return GpuHandles(self.index, None, None)
        if verb == "train_step":
            return dict.fromkeys(TRAIN_METRICS, 0.5)
        if verb == "token_samples":
            zeros, ones = [0.0] * SAMPLED_TOKENS, [1] * SAMPLED_TOKENS
            wanted = arguments[0] if self.index == 0 else ()
            assert isinstance(wanted, Sequence)
            return {
                index: TokenSample([65] * SAMPLED_TOKENS, ones, zeros, zeros, zeros, ones, zeros) for index in wanted
            }
        return None


class EngineStandIn:
    """Answers as one engine, which has sampled all that it is asked by the end of a poll."""

    def __init__(self, index: int, shape: Shape) -> None:
        self.shape = shape
        self.weight_version = 0

    def build(self, config: RunConfig, device_ids: Sequence[int], parts: Sequence[object], version: int | None) -> None:
        self.num_workers = config.policy.generation.vllm_cfg.tensor_parallel_size

    def poll(self, requests: list[RolloutRequest], budget_s: float) -> tuple[Polled, Packed]:
        tokens = np.zeros(self.shape.payload_tokens, np.int32)
        sampled = [
            Rollout(request, self.weight_version, tokens, tokens.astype(np.float32), "stop") for request in requests
        ]
        found = [replace(RolloutInfo.of(rollout), length=self.shape.num_tokens) for rollout in sampled]
        return (found, EngineWork(0.1, self.shape.num_tokens * len(found))), pack(sampled)

    def call(self, verb: str, *arguments: object) -> object:
        if verb in ("set_weight_version", "serve"):
            self.weight_version = cast(int, arguments[0])
        if verb == "tensor_dtypes":
            return [()] * self.num_workers
        if verb == "live_digest":
            return [{}] * self.num_workers
        return [VerifyReport(2**30, 0, 2**30, ())] * self.num_workers if verb == "refit" else None


class RewardStandIn:
    """Answers as a reward actor: three in sixteen rollouts are right."""

    def __init__(self, index: int, shape: Shape) -> None:
        self.shape = shape
        draw = random.Random(0)
        words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randrange(2, 10))) for _ in range(5000)]
        self.text = " ".join(draw.choices(words, k=20_000 + shape.text_characters // 3))

    def ready(self) -> int:
        return 8

    def judge(self, rollouts: Sequence[Unjudged]) -> tuple[Judged, list[bytes]]:
        ended: dict[str, tuple[Verdict, Ending]] = {
            info.request_id: (self.verdict(index, info), "over") for index, (info, *_) in enumerate(rollouts)
        }
        return (ended, [], RewardLoad(num_begun=len(ended))), []

    def verdict(self, index: int, info: RolloutInfo) -> Verdict:
        start = 37 * index % 50_000
        text = self.text[start : start + self.shape.text_characters]
        return Verdict(float(info.rollout_index in (1, 3, 5)), True, "ok", "42", text)


KINDS = {"PolicyActor": PolicyStandIn, "EngineActor": EngineStandIn, "RewardActor": RewardStandIn}


class Host:
    """A process that stands for many actors."""

    def __init__(self) -> None:
        self.actors: dict[tuple[str, int], object] = {}

    def at(self, kind: str, index: int, shape: Shape, method: str, *arguments: object) -> object:
        if method in ("build", "ready") or (kind, index) not in self.actors:
            self.actors[kind, index] = KINDS[kind](index, shape)
        return getattr(self.actors[kind, index], method)(*arguments)


class Silent:
    """Stands for what actors do when they are looked at: they take their time."""

    async def look(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Calls:
    """Messages that the driver sends, by (kind, method or verb)."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of arguments, where `weighs`."""
    weighs: bool = False


class Handle:
    """The driver's handle on an actor, which shares its process with others."""

    def __init__(self, host: object, kind: str, index: int, shape: Shape, calls: Calls, silent: ActorHandle) -> None:
        self._to, self.look = (host, (kind, index, shape), calls), silent.look

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        host, place, calls = self._to
        return Method(host.at, place, method, calls)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class Method:
    """The method that `remote` of a handle's method calls."""

    at: object
    place: tuple[str, int, Shape]
    name: str
    calls: Calls

    def options(self, **options: object) -> Method:
        return replace(self, at=self.at.options(**options))  # pyright: ignore[reportAttributeAccessIssue]

    def remote(self, *arguments: object) -> ray.ObjectRef:
        # A policy rank is told which of its models is meant.
        verb = arguments[1 if self.place[0] == "PolicyActor" else 0] if self.name == "call" else self.name
        key = self.place[0], str(verb)
        self.calls.counts[key] += 1
        if self.calls.weighs:
            self.calls.sizes[key] += len(
                cloudpickle.dumps([item for item in arguments if not isinstance(item, ray.ObjectRef)])
            )
        return self.at.remote(*self.place, self.name, *arguments)  # pyright: ignore[reportAttributeAccessIssue]


class Slots:
    """A place for every slot, as `Placement` gives, without asking Ray for one."""

    def __init__(self, config: RunConfig) -> None:
        self.num_slots, self.num_policy_ranks = config.num_slots, config.num_policy_ranks
        self.engines, self.own_slots = engine_slots(config), own_slots(config)
        self.node_of = {slot: slot // config.cluster.slots_per_node for slot in range(self.num_slots)}
        self.first_slots = list(range(0, self.num_slots, config.cluster.slots_per_node))
        self.reward_options = [dict[str, object]() for _ in self.first_slots]
        self.num_dedicated_slots = self.num_slots - self.num_policy_ranks
        self.absent_engines = set[int]()
        self.folder = Path("/")

    def num_threads(self, slot: int) -> int:
        return 1

    def options(self, slot: int, environment: dict[str, str]) -> dict[str, object]:
        return {}


@contextmanager
def hosts(num_processes: int) -> Iterator[list]:
    """Ray with so many processes for stand-ins, inside the `with` block."""
    with ray_runtime(RunConfig(cluster=ClusterConfig(cpu_units_per_node=1))):
        kind = ray.remote(Host)
        started = [kind.options(num_cpus=0).remote() for _ in range(num_processes)]
        yield started
        for host in started:
            ray.kill(host)  # pyright: ignore[reportArgumentType]


@dataclass
class Rehearsal:
    """A run that is ready for its first step, and what its driver has sent."""

    run: Run
    calls: Calls


@contextmanager
def rehearsal(shape: Shape, folder: Path, processes: list) -> Iterator[Rehearsal]:
    """The run of this shape, up to refit zero, inside the `with` block. Its actors are spread over `processes`."""
    config, calls = rehearsal_config(shape, folder), Calls()
    numbers: Counter[str] = Counter()
    started = itertools.count()
    silent = ray.remote(Silent).options(num_cpus=0, max_concurrency=10_000).remote()

    def start_actor(actor_class: type, options: Mapping[str, object], *arguments: object) -> Handle:
        kind = actor_class.__name__
        numbers[kind] += 1
        return Handle(processes[next(started) % len(processes)], kind, numbers[kind] - 1, shape, calls, silent)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def placed_slots(config: RunConfig, log_folder: Path, *, trains: bool) -> Iterator[Slots]:
        yield Slots(config)

    with ExitStack() as stack:
        for module in ("policies", "engines", "rewards"):
            stack.enter_context(patch(f"mrl.cluster.{module}.start_actor", start_actor))
        stack.enter_context(patch("mrl.cluster.session.placed_slots", placed_slots))
        # Rules look at files and at this host.
        stack.enter_context(patch.object(rollouts, "check_start", lambda config: config))
        stack.enter_context(patch.dict("os.environ", {"MRL_CACHE": "off"}))
        training = rollouts.prepare(config)
        run_folder = RunFolder(config)
        run_folder.open()
        with run_folder:
            run_folder.newest_checkpoint()
            with opened(training.open(run_folder, Budget(None, started=0.0))) as run:
                do(run.supplier.prove_weights())
                yield Rehearsal(run, calls)
