"""One rank of the policy: the model, its optimizer and its weights, behind the verbs of the training loop."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from conversion.boxes import Slot
from conversion.families.common import MegatronCoords
from conversion.families.registry import family
from conversion.files.safetensors import fill_layout
from conversion.tensors import box_view
from mrl.capacity import phases
from mrl.capacity.phases import Phase
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, pack_row, regroup
from mrl.policy import checkpoint, compat, parallel
from mrl.policy.arena import Arena, buffer_views
from mrl.policy.checkpoint import TrainState
from mrl.policy.checkpoint_writer import Writing
from mrl.policy.distribution import TokenDistribution
from mrl.policy.lora import attach_adapters
from mrl.policy.memory import TrainingMemory, swap
from mrl.policy.model import build_model, wrap_ddp
from mrl.policy.objectives import objective_of
from mrl.policy.optimizer import build_optimizer, build_scheduler
from mrl.policy.perturb import perturb
from mrl.policy.reports import SettleReport, WriteReport
from mrl.policy.reward_head import attach_reward_head
from mrl.policy.router_replay import RouterReplay
from mrl.policy.slab import PINNED, host_copies
from mrl.policy.step import BatchSize, TrainRow, check_equal_counts, compute_logprobs, evaluate, global_batch_size, train_step
from mrl.policy.token_advantages import FinishedBatch, finish_batches
from mrl.policy.weights import CopyCheck, rank_tensors
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.group import ExchangeGroup, GroupAddress
from mrl.refit.inputs import RankPlace, RefitInputs


class Policy:
    """One rank. Runs in an actor, under torchrun or in a test alike. Every method is collective over all ranks unless it says otherwise."""

    def __init__(self, config: RunConfig, *, rank: int, world_size: int, master_address: str, master_port: int, timeout_s: float) -> None:
        """Builds process groups, model, DDP, arena and optimizer, in this order: the optimizer keeps views into the arena.

        Weights are random until `load_hf`, `load_mcore` or `load_checkpoint`. `timeout_s` bounds every wait for another rank.
        """
        self._config = config
        self._timeout_s = timeout_s
        self._rank = rank
        parallel.initialize(
            config.policy.megatron_cfg,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=timeout_s,
            seed=config.training.seed,
            # Ranks are placed node by node, in the order of the devices.
            device_index=rank % max(config.cluster.gpus_per_node, 1),
        )
        self._coordinates = parallel.coordinates()
        self._hf_config: dict[str, object] = json.loads((Path(config.policy.model_name) / "config.json").read_text())
        self._layout = family(self._hf_config).megatron_layout(self._hf_config, *self.layout_arguments())
        bare_chunks = build_model(config.policy, self._hf_config)
        self._lora = attach_adapters(bare_chunks, config.policy, self._hf_config, seed=config.training.seed)
        head = attach_reward_head(bare_chunks, seed=config.training.seed) if config.algorithm == "rm" else {}
        self._live_layout = self._layout | (self._lora.layout if self._lora else {}) | head
        self._chunks = wrap_ddp(bare_chunks, config.policy)
        self._replay: RouterReplay | None = None
        if config.policy.router_replay.enabled:
            self._replay = RouterReplay(self._chunks, family(self._hf_config).expert_layers(self._hf_config))
        self._tensors = rank_tensors(self._chunks, self._live_layout)
        self._weights = self._lora.merged_weights(self._base(self._tensors)) if self._lora else self._tensors
        self._arena = Arena(self._weights, buffer_views(self._chunks), name=f"mrl-arena-{rank}")
        optimizer = build_optimizer(self._chunks, config.policy.megatron_cfg)
        scheduler = build_scheduler(optimizer, config.policy.megatron_cfg, num_train_steps=config.training.max_num_steps)
        self._state = TrainState(self._chunks, optimizer, scheduler)
        # The interleaved schedule goes through rows in groups of as many as there are stages.
        self._row_group = config.policy.megatron_cfg.pipeline_model_parallel_size if len(self._chunks) > 1 else 1
        self._empty_row = pack_row(
            [], divisible_by=config.policy.row_multiple, sequence_multiple=config.policy.sequence_multiple, pad_token_id=0
        )
        self._copy_check = CopyCheck(self._tensors, self._live_layout)
        distribution_of = TokenDistribution.of if config.has_engines else TokenDistribution.whole
        self._distribution = distribution_of(config.policy, int(str(self._hf_config["vocab_size"])))
        self._settled: SettleReport | None = None
        self._reference: dict[Slot, Tensor] | None = None
        self._batch: _Batch | None = None
        self._further_batches: deque[_Batch] = deque()
        self._writing: Writing | None = None
        self._exchange: Exchange | None = None
        device = next(iter(self._tensors.values())).device
        self._memory = TrainingMemory(self._state, device, PINNED if device.type == "cuda" else None)
        self._phase: Phase | None = None
        self.enter("load")

    @property
    def dp_rank(self) -> int:
        """Which rows of a batch are this rank's. Not collective."""
        return self._coordinates.dp

    def layout_arguments(self) -> RankPlace:
        """What `Family.megatron_layout` takes besides the model's configuration. Not collective."""
        place = self._coordinates
        coords = MegatronCoords(tp=place.tp, pp=place.pp, ep=place.ep, etp=place.etp)
        return self._config.policy.megatron_cfg.parallel, coords, self._config.policy.precision, "te" if compat.HAVE_TE else "local"

    def enter(self, phase: Phase) -> None:
        """Brings gradients and optimizer state where `mrl.capacity.phases` wants them in `phase`. Not collective.

        They stay where they are if engines have GPUs of their own, or there are none, and nobody else wants the memory.

        Raises:
            ValueError: no run goes from the current phase to `phase`.
        """
        residency = phases.enter(self._phase, phase)
        self._phase = phase
        if self._config.frees_training_memory:
            self._memory.place(residency)

    def load_hf(self, folder: Path | str) -> None:
        """Reads this rank's part of a Hugging Face folder. If the loss compares with a reference, it is these weights.

        Raises:
            ValueError: the folder lacks a tensor, or has it in another shape.
        """
        fill_layout(folder, self._layout, self._tensors)
        self._start_from_weights()

    def load_mcore(self, folder: Path | str) -> None:
        """As `load_hf`, bit for bit, from a Megatron checkpoint of the same weights, whatever parallel layout wrote it.

        Raises:
            ValueError: there is no checkpoint.
        """
        checkpoint.load(Path(folder), self._state, is_start=True)
        with torch.no_grad():
            for slot, content in self._layout.items():
                for box in content.padding:
                    # Checkpoints hold other amounts of padding, or none: Megatron leaves these rows as they were.
                    box_view(self._tensors[slot], box).zero_()
        self._start_from_weights()

    def _start_from_weights(self) -> None:
        self._state.optimizer.reload_model_params()
        self._settled = None
        if self._config.keeps_reference:
            self.settled_weights()
            # Beside frozen weights training changes only buffers; adapters are switched off instead.
            changing = {
                slot: tensor for slot, tensor in self._tensors.items() if self._lora is None or not isinstance(tensor, nn.Parameter)
            }
            # Tied weights are one tensor under two names; swapped twice they would not change.
            changing = dict({id(tensor): (slot, tensor) for slot, tensor in changing.items()}.values())
            if self._reference is None:
                self._reference = dict(zip(changing, host_copies([tensor.detach() for tensor in changing.values()]), strict=True))
            else:
                for slot, tensor in changing.items():
                    self._reference[slot].copy_(tensor.detach())

    def begin_save(self, weights_dir: Path | str) -> None:
        """Begins to write `weights_dir/iter_0000000`, optimizer state included if so configured; in the background if so configured.

        See `mrl.policy.checkpoint.begin_save`. The save before must be finished: there is one copy of the state at most.
        """
        assert self._writing is None, "finish_save comes first"
        self.settled_weights()
        self._writing = checkpoint.begin_save(
            Path(weights_dir),
            self._state,
            hf_config=self._hf_config,
            save_optimizer=self._config.checkpointing.save_optimizer,
            adapters=self._lora.description if self._lora else None,
            in_background=self._config.policy.megatron_cfg.checkpoint.async_save,
        )

    def is_written(self) -> bool:
        """Whether this rank has written its part. Not collective.

        Raises:
            RuntimeError: it could not.
        """
        assert self._writing is not None, "begin_save comes first"
        return self._writing.is_done()

    def finish_save(self) -> WriteReport:
        """Waits until what `begin_save` began is written, and completes it; returns what this rank wrote.

        Raises:
            RuntimeError: it could not be written.
            TimeoutError: that takes longer than deadlines.checkpoint_s.
        """
        assert self._writing is not None, "begin_save comes first"
        writing, self._writing = self._writing, None
        return writing.finish(self._config.deadlines.checkpoint_s)

    def load_checkpoint(self, weights_dir: Path | str) -> None:
        """Goes on from a checkpoint of any parallel layout. The reference model stays the one of `load_hf` or `load_mcore`.

        Raises:
            ValueError: there is no checkpoint, or it has other adapters.
        """
        with self._memory.loading():
            checkpoint.load(Path(weights_dir), self._state, adapters=self._lora.description if self._lora else None)
        self._settled = None

    def perturb(self, seed: int) -> None:
        """Changes every weight a little, as a function of `seed` alone: for diagnostics that need weights that no file holds."""
        self.settled_weights()
        perturb(self._tensors, self._live_layout, seed=seed)
        self._state.optimizer.reload_model_params()
        self._settled = None

    def settle(self) -> SettleReport:
        """Makes every copy of every weight current, and proves that the copies are equal.

        With overlap_param_gather the optimizer leaves (dp-1)/dp of each rank's weights old until the next forward pass.

        Raises:
            RuntimeError: copies differ; names weights and ranks.
        """
        if self._settled is None and self._config.policy.megatron_cfg.optimizer.use_distributed_optimizer:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        # Gathered once, a damaged copy must not be overwritten with a good one before it is seen, nor spread.
        self._settled = None
        live = rank_tensors(self._chunks, self._live_layout)
        self._arena.check(self._lora.as_read(self._base(live)) if self._lora else live)
        report = self._copy_check.run()
        if self._lora:
            self._lora.merge(live)
        self._settled = report
        return report

    def settled_weights(self) -> Mapping[Slot, Tensor]:
        """The weights by slot, adapters merged, settled if they are not yet. The only way to read weights."""
        if self._settled is None:
            self.settle()
        return self._weights

    def set_batch(self, rows: list[PackedRow], logprob_rows: list[PackedRow] | None = None, *, is_further: bool = False) -> None:
        """Sets this rank's rows of the global batch; ranks with the same `dp_rank` pass the same rows.

        A further batch waits behind those that are set: logprobs are computed for all, each `train_step` uses up the first.
        `logprob_rows` hold the same sequences in other rows, for the logprob passes; None = the same rows.

        Raises:
            RuntimeError: ranks hold different numbers of rows.
            ValueError: rows lack routes, although policy.router_replay.enabled.
        """
        if self._replay is not None:
            self._replay.check(rows)
        rows = self._whole_groups(rows)
        logprob_rows = rows if logprob_rows is None else logprob_rows
        check_equal_counts(len(logprob_rows))
        check_equal_counts(len(rows))
        batch = _Batch(rows, logprob_rows, global_batch_size(rows))
        if is_further:
            self._further_batches.append(batch)
        else:
            self._batch = batch
            self._further_batches.clear()

    def compute_old_logprobs(self) -> None:
        """Log-probabilities of the batches under the current weights, before any update. They stay on the last pipeline stage."""
        with self._replay.counting() if self._replay is not None else nullcontext():
            for batch in (self._current_batch(), *self._further_batches):
                batch.old_logprobs = batch.by_train_row(self._logprobs(batch.logprob_rows, self._distribution))

    def compute_reference_logprobs(self) -> None:
        """Log-probabilities of the batches under the weights that the run started from, of all tokens: the reference is never truncated.

        It chooses its experts itself: as other weights, it is another model than the one whose routes the rows carry. Afterwards the
        current weights are back, bit for bit.
        """
        with self._reference_weights():
            for batch in (self._current_batch(), *self._further_batches):
                rows = [dataclasses.replace(row, routes=None) for row in batch.logprob_rows]
                batch.reference_logprobs = batch.by_train_row(self._logprobs(rows, self._distribution.untruncated))

    def logprobs_of_rows(self, rows: list[PackedRow]) -> list[np.ndarray]:
        """Log-probability of every label, float32 [T] per row; an empty list on all but the last pipeline stage."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs(rows, self._distribution)]

    def train_step(self) -> dict[str, float]:
        """One optimizer step on the batch, which is then used up; returns metrics `train/*`, the same floats on every rank.

        Raises:
            RuntimeError: loss or gradient is not finite, on all ranks; no parameter was changed. Or the phase is not `train`.
        """
        if self._phase != "train":
            raise RuntimeError(f"a train step in phase {self._phase}, where gradients have no memory: enter('train') comes first")
        if self._config.needs_old_logprobs and self._current_batch().old_logprobs is None:
            raise RuntimeError("compute_old_logprobs comes before train_step")
        finished = self._finished_batch()
        self._take_batch()
        self._settled = None
        metrics = train_step(
            self._state.chunks,
            self._state.optimizer,
            finished.rows,
            size=finished.size,
            objective=objective_of(self._config, self._distribution, finished.size),
            megatron=self._config.policy.megatron_cfg,
            replay=self._replay,
        )
        if self._batch is None:
            # As in NeMo RL, the learning rate follows the steps of the run, not the updates of one.
            self._state.scheduler.step(increment=1)
        mismatch = self._replay.take_metrics() if self._replay is not None else {}
        return metrics | finished.metrics | {f"train/{name}": value for name, value in mismatch.items()}

    def evaluate(self) -> dict[str, float]:
        """Metrics of the objective on the batch, which is then used up, the same floats on every rank; trains nothing.

        For objectives that need no old logprobs.
        """
        batch = self._take_batch()
        self.settled_weights()
        objective = objective_of(self._config, self._distribution, batch.size)
        with self._lora.without_dropout() if self._lora else nullcontext():
            metrics = evaluate(self._state.chunks, batch.train_rows(self._coordinates.is_last_stage), objective)
        return metrics

    def prepare_refit(self, inputs: RefitInputs, address: GroupAddress | None) -> GpuHandles:
        """Joins the exchange and sets up this rank's part; returns what the engine workers of this GPU need to pull.

        Collective over all participants at `address`; None where this rank is all there is.
        """
        if self._exchange is not None:
            # Before the next one: two would not fit.
            self._exchange.close()
            self._exchange = None
        weights = self.settled_weights()
        device = next(iter(weights.values())).device
        group = ExchangeGroup(address, self._rank, device=device, timeout_s=self._timeout_s) if address else None
        self._exchange = Exchange(inputs.schedule(), self._rank, weights, self._arena.handle(), group=group)
        return self._exchange.handles()

    def exchange(self, round_index: int) -> None:
        """Runs one round of the exchange, from settled weights. See `mrl.refit.exchange.Exchange.run`."""
        assert self._exchange is not None, "prepare_refit comes first"
        self.settled_weights()
        self._exchange.run(round_index)

    def close(self) -> None:
        """Leaves the process groups. Not collective; the policy cannot be used afterwards."""
        parallel.shutdown()

    def _finished_batch(self) -> FinishedBatch:
        """The batch as the loss wants it. The first of a step finishes those behind it too: some signals are over the whole step."""
        batch, is_last_stage = self._current_batch(), self._coordinates.is_last_stage
        if not self._config.has_engines:
            return FinishedBatch(batch.train_rows(is_last_stage), batch.size, {})
        if batch.finished is None:
            batches = [batch, *self._further_batches]
            rows = [each.train_rows(is_last_stage) for each in batches]
            for each, finished in zip(batches, finish_batches(rows, self._config.grpo, self._config.loss_fn), strict=True):
                each.finished = finished
        assert batch.finished is not None
        return batch.finished

    def _take_batch(self) -> _Batch:
        batch = self._current_batch()
        self._batch = self._further_batches.popleft() if self._further_batches else None
        return batch

    def _current_batch(self) -> _Batch:
        if self._batch is None:
            raise RuntimeError("there is no batch: set_batch comes first, and every train_step uses its batch up")
        return self._batch

    def _whole_groups(self, rows: list[PackedRow]) -> list[PackedRow]:
        """`rows`, and as many empty ones as their schedule needs beside them."""
        return [*rows, *[self._empty_row] * (-len(rows) % self._row_group)]

    def _logprobs(self, rows: list[PackedRow], distribution: TokenDistribution) -> list[Tensor]:
        self.settled_weights()
        with self._lora.without_dropout() if self._lora else nullcontext():
            logprobs = compute_logprobs(self._chunks, self._whole_groups(rows), distribution, self._replay)
        return logprobs[: len(rows)]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise RuntimeError("there is no reference model: load_hf and load_mcore keep it where the loss compares with it")
        self.settled_weights()
        pairs = [(self._tensors[slot], copy) for slot, copy in self._reference.items()]
        swap(pairs)
        try:
            with self._lora.disabled() if self._lora else nullcontext():
                yield
        finally:
            swap(pairs)

    def _base(self, tensors: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """Without the factors of adapters."""
        return {slot: tensors[slot] for slot in self._layout}


@dataclass
class _Batch:
    """This rank's rows of a global batch, and what has been computed for them: logprobs by row of training, none off the last stage."""

    rows: list[PackedRow]
    logprob_rows: list[PackedRow]
    size: BatchSize
    old_logprobs: list[Tensor] | None = None
    reference_logprobs: list[Tensor] | None = None
    finished: FinishedBatch | None = None

    def by_train_row(self, logprobs: list[Tensor]) -> list[Tensor]:
        """From those by row of the logprob passes; none where there are none."""
        return regroup(logprobs, self.logprob_rows, self.rows) if logprobs else []

    def train_rows(self, is_last_stage: bool) -> list[TrainRow]:
        if not is_last_stage:
            return [TrainRow(row, None, None) for row in self.rows]
        olds, references = (logprobs or [None] * len(self.rows) for logprobs in (self.old_logprobs, self.reference_logprobs))
        return [TrainRow(*item) for item in zip(self.rows, olds, references, strict=True)]
