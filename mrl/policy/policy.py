# SPDX-License-Identifier: Apache-2.0
"""One rank of a model, the policy or another: the model, its optimizer and weights, behind the verbs of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.boxes import Layout, Slot
from conversion.families.registry import family
from conversion.files.durable import IO_TIMEOUT_S
from conversion.files.hf_folder import has_reward_head, read_config
from conversion.files.manifest import WriteReport
from conversion.files.reading import find_difference
from conversion.files.safetensors import fill_layout
from conversion.tensors import box_view
from mrl import spans
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import sharing_of
from mrl.data.packing import PackedRow, pack_row, tensors_by_sequence, token_samples
from mrl.gpus import check_device, on_gpu
from mrl.phases import ModelName, Phase
from mrl.policy import checkpoint, parallel
from mrl.policy.batch import RankBatch, answers_for_rows, check_equal_counts, finish_batches, global_batch_size
from mrl.policy.checkpoint import CheckpointWrite
from mrl.policy.host_block import HostBlock, HostStorages, host_copies, swap
from mrl.policy.logprobs import TokenDistribution, vocab_size_of
from mrl.policy.lora import attach_adapters
from mrl.policy.model import FLAVOUR, build_model, live_layout, wrap_ddp
from mrl.policy.moe import RouterReplay
from mrl.policy.objectives import Objective
from mrl.policy.optimizer import TrainingMemory, TrainState, build_optimizer, build_scheduler
from mrl.policy.output import attach_reward_head
from mrl.policy.parallel import Meeting
from mrl.policy.profile import RankProfiler
from mrl.policy.refits import RefitSide
from mrl.policy.roles import role_for
from mrl.policy.step import compute_logprobs, evaluate, train_step
from mrl.policy.weights import Arena, CopyCheck, buffer_views, perturb, rank_tensors
from mrl.refit.exchange import GpuHandles
from mrl.refit.group import GroupAddress
from mrl.refit.inputs import Part, RankPlace, RefitInputs
from mrl.types import TokenSample

T = TypeVar("T")


@parallel.in_turn
class PolicyRank:
    """One rank, in an actor, under torchrun or in a test. Methods are collective over all ranks unless said otherwise.

    A process may hold several, of different models and layouts: ranks call their methods in the same order, whichever
    they belong to.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        meeting: Meeting,
        timeout_s: float,
        model: ModelName = "policy",
    ) -> None:
        """Builds process groups, model, DDP, arena and optimizer, in order: the optimizer keeps views into the arena.

        Weights are random until `load_hf`, `load_mcore` or `load_checkpoint`. `timeout_s` bounds every wait for another
        rank. Models other than the policy have no arena, and teachers nothing to train with.
        """
        check_device(config.cluster.gpus_per_node)
        vocab_size = vocab_size_of(config, model)
        section = replace(config.model(model), share_prefixes=sharing_of(config, model))
        self._config, self._model, self._section = config, model, section
        self._role = role_for(model)
        self._timeout_s, self._rank = timeout_s, rank
        self.megatron = parallel.initialize(
            section.megatron_cfg,
            rank=rank,
            world_size=world_size,
            meeting=meeting,
            timeout_s=timeout_s,
            seed=config.training.seed,
            device_index=rank % max(config.cluster.gpus_per_node, 1),
        )
        self._hf_config = read_config(Path(section.model_name) / "config.json")
        self._layout = live_layout(section, self._hf_config, parallel.coordinates())
        is_trained, trains_mtp = self._role.trains_in is not None, config.mtp_steps_of(model) > 0
        bare_chunks = build_model(section, self._hf_config, is_trained=is_trained, trains_mtp=trains_mtp)
        self._lora = attach_adapters(bare_chunks, section, self._hf_config, seed=config.training.seed)
        has_head = config.algorithm == "rm" or self._role.has_head
        self._head = attach_reward_head(bare_chunks, seed=config.training.seed) if has_head else Layout()
        self._live_layout = self._layout | self._lora.layout | self._head
        self._chunks = wrap_ddp(bare_chunks, section)
        self._models = unwrap_model(self._chunks)
        self._replay: RouterReplay | None = None
        if section.router_replay.enabled:
            self._replay = RouterReplay(self._chunks, family(self._hf_config).expert_layers(self._hf_config))
        self._tensors = rank_tensors(self._models, self._live_layout)
        self._weights = self._arena_tensors(self._tensors)
        self._arena = (
            Arena(self._weights, buffer_views(self._chunks), name=f"mrl-arena-{rank}") if self._role.is_mapped else None
        )
        optimizer = build_optimizer(self._chunks, section.megatron_cfg)
        num_passes = config.num_scheduled_steps_of(model)
        scheduler = build_scheduler(optimizer, section.megatron_cfg, num_train_steps=num_passes)
        self._state = TrainState(self._chunks, optimizer, scheduler)
        self._row_group = section.megatron_cfg.pipeline_model_parallel_size if len(self._chunks) > 1 else 1
        self._empty_row = pack_row(
            {},
            divisible_by=section.row_multiple,
            sequence_multiple=section.sequence_multiple,
            pad_token_id=0,
        )
        self._copy_check = CopyCheck(self._tensors, self._live_layout)

        self.distribution = TokenDistribution.of(section, vocab_size, is_sampled=config.has_engines)
        self._is_settled = False
        self._reference: dict[Slot, Tensor] | None = None
        self._batches: list[RankBatch] = []
        self._has_moments = False
        self._writing: CheckpointWrite | None = None
        self._save_group: dist.ProcessGroup | None = None
        self._refits: RefitSide | None = None
        if self._arena is not None:
            self._refits = RefitSide(rank, self._lora, self._weights, self._arena, timeout_s=timeout_s)
        device = next(iter(self._tensors.values())).device
        self._memory = TrainingMemory(self._state, device, HostBlock() if device.type == "cuda" else None)
        is_moved = self._arena is None and device.type == "cuda"
        self._storages = HostStorages(list(self._tensors.values()), is_constant=not is_trained) if is_moved else None
        self._profiler = RankProfiler(config.profiler)
        self._phase: Phase | None = None
        self.enter("load")

    @property
    def dp_rank(self) -> int:
        """Index of the rows of a batch that belong to this rank. Not collective."""
        self.megatron.make_current()
        return parallel_state.get_data_parallel_rank()

    def make_current(self) -> None:
        """Gives this model Megatron's modules, as each of its methods does first. Not collective."""

    @property
    def phase(self) -> Phase | None:
        """The current phase. Not collective."""
        return self._phase

    def device_name(self) -> str:
        """NVIDIA's name of this rank's GPU; "" without one. Not collective."""
        return torch.cuda.get_device_name() if on_gpu() else ""

    def layout_arguments(self) -> RankPlace:
        """The arguments of `Family.megatron_layout` besides the model's configuration. Not collective."""
        return self._section.megatron_cfg.parallel, parallel.coordinates(), self._section.precision, FLAVOUR

    def enter(self, phase: Phase) -> None:
        """Moves gradients and optimizer state where `mrl.phases` wants them if others share the device. Not collective.

        Teachers and critics move their weights too, and may skip phases in which they do nothing.
        """
        residency = self._role.residency(self._phase, phase)
        self._phase = phase
        if phase == "refit":
            self._batches.clear()
        if self._storages is not None:
            self._storages.place(is_on_device=residency.weights == "device")
        if self._config.frees_training_memory:
            self._memory.place(residency)

    def load_hf(self, folder: Path | str) -> None:
        """Reads this rank's part of a Hugging Face folder. These weights are the reference if the loss has one."""
        head = self._head if self._head and has_reward_head(Path(folder)) else {}
        self._lora.forget_base(self._tensors)
        fill_layout(folder, self._layout | head, self._tensors)
        self._start_from_weights()

    def load_mcore(self, folder: Path | str) -> None:
        """Loads the same weights as `load_hf`, bit for bit, from a Megatron checkpoint, whatever layout wrote it."""
        self._lora.forget_base(self._tensors)
        checkpoint.load(Path(folder), self._state, is_start=True)
        with torch.no_grad():
            for slot, content in self._layout.items():
                for box in content.padding:
                    # Checkpoints hold other amounts of padding, or none: Megatron leaves these rows as they were.
                    box_view(self._tensors[slot], box).zero_()
        self._start_from_weights()

    def _start_from_weights(self) -> None:
        self._state.optimizer.reload_model_params()
        self._is_settled = False
        if self._arena is None:
            # Settled once, a teacher's weights stay so; they may lie on the host from here on.
            self.settle()
        elif self._config.keeps_reference:
            self._keep_reference()

    def _keep_reference(self) -> None:
        self._ready_to_compute()
        # With frozen weights training changes only buffers; adapters are switched off instead.
        is_frozen = self._lora.description is not None
        changing = {
            slot: tensor
            for slot, tensor in self._tensors.items()
            if not (is_frozen and isinstance(tensor, nn.Parameter))
        }
        changing = dict({id(tensor): (slot, tensor) for slot, tensor in changing.items()}.values())
        if self._reference is None:
            self._reference = dict(
                zip(changing, host_copies([tensor.detach() for tensor in changing.values()]), strict=True)
            )
        else:
            for slot, tensor in changing.items():
                self._reference[slot].copy_(tensor.detach())

    def begin_save(self, weights_dir: Path | str) -> str:
        """Begins to write `weights_dir/iter_0000000`; see `mrl.policy.checkpoint`. The save before must be complete."""
        if self._writing is not None:
            self._writing.finish(IO_TIMEOUT_S)
        if problem := checkpoint.find_obstacle(Path(weights_dir)):
            return problem
        self._ready_to_compute()
        is_async = self._section.megatron_cfg.checkpoint.async_save
        if is_async and self._save_group is None:
            self._save_group = cast(
                "dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=IO_TIMEOUT_S))
            )
        try:
            self._writing = checkpoint.begin_save(
                Path(weights_dir),
                self._state,
                hf_config=self._hf_config,
                # A policy that waits for its critic has no moments yet, and is as it was loaded.
                save_optimizer=self._config.checkpointing.save_optimizer and self._has_moments,
                frozen=self._config.frozen_settings(self._model),
                adapters=self._lora.description,
                group=self._save_group if is_async else None,
            )
        except OSError as error:
            return str(error)
        return ""

    def finish_save(self, timeout_s: float) -> WriteReport:
        """Waits for the write of `begin_save`; what this rank wrote, or why no checkpoint. Not collective."""
        assert self._writing is not None, "begin_save comes first"
        return self._writing.finish(timeout_s)

    def find_damage(self, shards: Mapping[Path, str]) -> str:
        """Describes the first of these files with another sha256; "" if none. Reads all bytes. Not collective."""
        return find_difference(shards)

    def load_checkpoint(self, weights_dir: Path | str) -> None:
        """Loads a checkpoint of any parallel layout. The reference model stays the one of `load_hf` or `load_mcore`."""
        self._lora.forget_base(self._tensors)
        with self._memory.loading():
            self._has_moments = checkpoint.load(Path(weights_dir), self._state, adapters=self._lora.description)
        self._is_settled = False

    def perturb(self, seed: int) -> None:
        """Changes every weight a little, by `seed` alone, for diagnostics that need weights that no file holds."""
        self._ready_to_compute()
        self._lora.forget_base(self._tensors)
        perturb(self._tensors, self._live_layout, seed=seed)
        self._state.optimizer.reload_model_params()
        self._is_settled = False

    def settle(self) -> None:
        """Makes every copy of every weight current, and proves that the copies are equal.

        With overlap_param_gather the optimizer leaves (dp-1)/dp of each rank's weights old until the next forward pass.

        Raises:
            RuntimeError: copies differ; names weights and ranks.
        """
        if not self._is_settled and self._section.megatron_cfg.optimizer.use_distributed_optimizer:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        # Settled weights are not gathered again: that would overwrite a damaged copy with a good one before it is seen,
        # or spread it.
        self._is_settled = False
        live = rank_tensors(self._models, self._live_layout)
        if self._arena is not None:
            self._arena.check(self._arena_tensors(live))
        self._copy_check.run()
        self._is_settled = True

    def settled_weights(self) -> Mapping[Slot, Tensor]:
        """Settles the weights if needed, and returns them by slot, adapters merged. For exports and diagnostics."""
        if not self._is_settled:
            self.settle()
        self._lora.merge(self._tensors)
        return self._weights

    def _ready_to_compute(self) -> None:
        self._lora.unmerge(self._tensors)
        if not self._is_settled:
            self.settle()

    def set_batch(
        self, rows: list[PackedRow], logprob_rows: list[PackedRow] | None = None, *, is_further: bool = False
    ) -> None:
        """Sets this rank's rows of the global batch; ranks with the same `dp_rank` pass the same rows.

        A further batch is the next of the same step. `logprob_rows` hold the same sequences, for the logprob passes.
        """
        if self._replay is not None:
            self._replay.check(rows)
        rows = self._whole_groups(rows)
        logprob_rows = rows if logprob_rows is None else logprob_rows
        check_equal_counts(len(logprob_rows))
        check_equal_counts(len(rows))
        if not is_further:
            self._batches.clear()
        self._batches.append(RankBatch(rows, logprob_rows, global_batch_size(rows)))

    def batches(self) -> list[RankBatch]:
        """The batches of the step. Not collective."""
        if not self._batches:
            raise RuntimeError("there is no batch: set_batch comes first, once a step")
        return self._batches

    def computed(self, compute: Callable[..., T], rows: list[PackedRow], *arguments: object) -> T:
        """Runs a pass of `mrl.policy.step` without gradients over rows padded for the schedule from settled weights."""
        self._ready_to_compute()
        with self._lora.without_dropout():
            return compute(self._chunks, self._whole_groups(rows), *arguments)

    def compute_old_logprobs(self) -> None:
        """Computes logprobs of batches under current weights before any update. The last pipeline stage keeps them."""
        with self._replay.counting() if self._replay is not None else nullcontext():
            for batch in self.batches():
                batch.has_old_logprobs = True
                for row, logprobs_T in batch.with_values(self._logprobs(batch.logprob_rows, self.distribution)):
                    row.old_logprobs_T = logprobs_T

    def compute_reference_logprobs(self) -> None:
        """Computes logprobs of the batches under the weights the run started from, never truncated by top-k or top-p.

        This reference chooses its experts itself. Afterwards the current weights are back, bit for bit.
        """
        with self._reference_weights():
            for batch in self.batches():
                rows = [replace(row, routes=None) for row in batch.logprob_rows]
                for row, logprobs_T in batch.with_values(self._logprobs(rows, self.distribution.untruncated)):
                    row.reference_logprobs_T = logprobs_T

    def logprobs_of_rows(self, rows: list[PackedRow]) -> list[np.ndarray]:
        """Log-probability of every label, float32 [T] per row; an empty list on all but the last pipeline stage."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs(rows, self.distribution)]

    def train_step(self, update_index: int = 0) -> dict[str, float]:
        """Takes one optimizer step on a batch of the step; returns metrics `train/*`, the same floats on every rank.

        Raises:
            RuntimeError: loss or gradient is not finite, on all ranks, and no parameter has changed, unless
                `policy.not_finite_steps` says that such a step is skipped. Or the phase is not `train`.
        """
        if self._phase != (needed := self._role.trains_in):
            raise RuntimeError(
                f"a train step in phase {self._phase}, where gradients have no memory: enter('{needed}') comes first"
            )
        batch = self.batches()[update_index]
        if self._arena is not None and self._config.has_engines:
            if self._config.needs_old_logprobs and not batch.has_old_logprobs:
                raise RuntimeError("compute_old_logprobs comes before train_step")
            if not batch.is_finished:
                self.finish_batches()
        self._lora.unmerge(self._tensors)
        self._is_settled = False
        metrics = train_step(
            self._chunks,
            self._state.optimizer,
            batch.rows,
            size=batch.size,
            objective=self._objective(batch),
            megatron=self._section.megatron_cfg,
            replay=self._replay,
            skips=self._section.not_finite_steps == "skip",
        )
        self._has_moments |= not metrics.get("train/num_skipped_updates")
        if batch is self._batches[-1]:
            # As in NeMo RL, the learning rate follows the steps of the run, or their passes in PPO, not the updates of
            # one.
            self._state.scheduler.step(increment=1)
        mismatch = self._replay.take_metrics() if self._replay is not None else {}
        return metrics | batch.metrics | {f"train/{name}": value for name, value in mismatch.items()}

    def finish_batches(self) -> None:
        """Finishes the step's batches before the first update, as some signals span them: masks, token advantages."""
        gae = self._config.ppo.adv_estimator if self._config.has_critic else None
        loss = self._config.loss_fn if self._config.algorithm != "distillation" else None
        finish_batches(self._batches, self._config.rollouts, loss, gae, self._config.teaching)

    def batch_metrics(self) -> list[dict[str, float]]:
        """Metrics of the advantages of the step's batches, the same floats on every rank. Not collective."""
        return [batch.metrics for batch in self.batches()]

    def sequence_tensors(self) -> list[dict[int, dict[str, np.ndarray]]]:
        """Logprobs, mask and advantages of the step's sequences, by index, on the rank that answers. Not collective."""
        return [tensors_by_sequence(batch.rows) if answers_for_rows() else {} for batch in self._batches]

    def token_samples(self, wanted: Collection[int]) -> dict[int, TokenSample]:
        """Sequences of these indices of the step's first batch, from the tp and cp rank that answers. Not collective.

        Ends the step: the batches are let go, and a second call finds nothing.
        """
        batches, self._batches = self._batches, []
        if not batches or not answers_for_rows():
            return {}
        found = [token_samples(row, wanted) for row in batches[0].rows if row.entropy_T is not None]
        return {index: sample for samples in found for index, sample in samples.items()}

    def evaluate(self) -> dict[str, float]:
        """Metrics of the objective on the batch, the same floats on every rank. For losses without old logprobs."""
        batch = self.batches()[0]
        self._ready_to_compute()
        with self._lora.without_dropout():
            return evaluate(self._chunks, batch.rows, self._objective(batch))

    def start_profile(self) -> None:
        """Profiles this rank until `stop_profile`. Not collective."""
        self._profiler.start()

    def stop_profile(self, folder: Path, step: int) -> str:
        """Writes the record as that of `step`; "" or why it cannot be written. Not collective."""
        return self._profiler.stop(folder / f"step{step}_rank{self._rank}.json.gz")

    def prepare_refit(self, inputs: RefitInputs, address: GroupAddress) -> GpuHandles:
        """Sets up this rank's part of the exchange, collective at `address`; returns what its GPU's workers need."""
        assert self._refits is not None, "engines hold the policy alone"
        if not self._is_settled:
            self.settle()
        self._lora.place(self._tensors)
        return self._refits.prepare(inputs, address)

    def refit(self, attempt: int, readers: Collection[int], timeout_s: float, part: Part = "weights") -> None:
        """Makes room for the engines' weights, settles its own, and exchanges them; leaves the device to KV caches."""
        assert self._refits is not None, "engines hold the policy alone"
        start = time.monotonic()
        try:
            self.enter("refit")
            self.settle()
            self._lora.place(self._tensors)
        except BaseException:
            self._refits.leave(attempt, part)
            raise
        spans.add("settle", start, phase="refit", **spans.memory_facts())
        self._refits.run(attempt, readers, timeout_s, part)
        self.enter("generate")

    def close(self) -> None:
        """Leaves the process groups. Not collective; the policy cannot be used afterwards."""
        parallel.shutdown()

    def _whole_groups(self, rows: list[PackedRow]) -> list[PackedRow]:
        """`rows`, and the empty ones the interleaved schedule needs: it goes through rows in groups, one per stage."""
        return [*rows, *(replace(self._empty_row) for _ in range(-len(rows) % self._row_group))]

    def _objective(self, batch: RankBatch) -> Objective:
        return self._role.objective(self._config, self.distribution, batch)

    def _logprobs(self, rows: list[PackedRow], distribution: TokenDistribution) -> list[Tensor]:
        return self.computed(compute_logprobs, rows, distribution, self._replay)[: len(rows)]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise RuntimeError(
                "there is no reference model: load_hf and load_mcore keep it where the loss compares with it"
            )
        self._ready_to_compute()
        pairs = [(self._tensors[slot], copy) for slot, copy in self._reference.items()]
        swap(pairs)
        try:
            with self._lora.disabled():
                yield
        finally:
            swap(pairs)

    def _arena_tensors(self, tensors: Mapping[Slot, Tensor]) -> Mapping[Slot, Tensor]:
        """The weights in the arena. With adapters these are the frozen ones, to which `Lora.merge` adds them."""
        return tensors if self._lora.description is None else {slot: tensors[slot] for slot in self._layout}
