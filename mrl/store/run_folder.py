# SPDX-License-Identifier: Apache-2.0
"""The run folder: checkpoints, ledger, metrics, resolved config and report of a run. One attempt at a time owns it."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from conversion.files.durable import IO_TIMEOUT_S, WRITE_TIMEOUT_S, make_folder, sync_file, write_atomic
from conversion.files.hf_folder import OF_THE_MODEL, copy_companions
from conversion.files.limits import LimitedThread, is_waiting, within
from mrl import spans
from mrl.config.load import resolved_yaml
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import without_secrets
from mrl.data.chat import OWN_TEMPLATE, load_tokenizer, template_text
from mrl.data.reading import LeftOut, write_quarantine
from mrl.env import kill_point
from mrl.metrics import ATTEMPT
from mrl.phases import ModelName
from mrl.rooms import write_report
from mrl.store.about import about_this_attempt, attempt_changes, end_as_complete
from mrl.store.advisories import Advisor, facts_of
from mrl.store.checkpoints import (
    LEDGER,
    RUN_CONFIG,
    Checkpoint,
    CheckpointStore,
    NoWholeCheckpoint,
    check_models,
    find_gone,
    find_lost_run,
    is_damaged,
    newest_step,
)
from mrl.store.console import step_header, step_lines, story, supervised_lines
from mrl.store.disk import way_out
from mrl.store.identity import IDENTITY, TOKENIZER_FILES, Identity, check_identity
from mrl.store.ledger import Ledger
from mrl.store.lines import JsonlLogger, drop_later_steps, last_step_in, read_or_set_aside
from mrl.store.loggers.group import Loggers, check_loggers
from mrl.store.marks import Mark, find_run, find_strangers, is_run_folder, new_id, write_mark
from mrl.store.ownership import FolderLost, Ownership
from mrl.store.run_files import ABOUT, ENDED, MASKED, METRIC_KEYS, METRICS, OWNER, REFIT, SAMPLES, State, read_rows
from mrl.store.samples import (
    Split,
    append_report_samples,
    best_and_worst,
    drop_old_step_data,
    sample_lines,
    token_rows,
    write_step_data,
)
from mrl.types import RolloutGroup, Status, TokenSamples, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REPORT = "report.html"
# What a checkpoint has of the tokenizer's folder, by transformers' names: a model's weights may lie there, too, in any
# format.
_FILES = """config.json generation_config.json *processor_config.json audio_tokenizer_config.json
additional_chat_templates/*.jinja *.py
*.spm *.tiktoken tekken.json bpe.codes *vocab.json dict.txt normalizer.json prophetnet.tokenizer emoji.json
byte_maps.json
word_shape.json word_pronunciation.json"""
COPIED = (*TOKENIZER_FILES, *_FILES.split())
MAX_REPORT_SHARE = 0.01
END_S = 5.0
"""Limit of the last write, after which the process ends."""
MEASURED_BYTES = 2**18


class RunFolder:
    """`open` makes this process own `checkpointing.checkpoint_dir`; the context manager gives it back at the end."""

    def __init__(self, config: RunConfig, identity: Identity | None = None) -> None:
        """With `identity`, a run resumes only with the model, tokenizer and data that it had."""
        self.config = config
        self._identity = identity
        self.path = Path(config.checkpointing.checkpoint_dir).absolute()
        self._attempts = self.path / "logs"
        self.log_folder = self._next_log_folder()
        self._ownership = Ownership(self.path / OWNER)
        self.checkpoints = CheckpointStore(self.path, config.checkpointing, check_owner=self._ownership.check)
        self._metrics: JsonlLogger | None = None
        self._loggers: Loggers | None = None
        self._last_logged_step = -1
        self._failed_writes: Counter[str] = Counter()
        self._advisor = Advisor(facts_of(asdict(config)))
        self._masked: dict[Status, str] = {}
        self._next_report = 0.0
        # Hundreds of megabytes of texts a step take seconds to compress.
        self._writer = LimitedThread("texts")
        self._texts: Future[None] | None = None
        self.next_metrics: dict[str, float] = {}
        """Metrics to add to the next line."""

    def open(self) -> None:
        """Takes the folder over, and removes unfinished saves of an interrupted attempt.

        Raises:
            ValueError: a living process owns the folder, it cannot be written, its ledger or all of its checkpoints are
                damaged beyond repair, a logger's package is missing, or the run would resume with another model,
                tokenizer or data, or with a model that the checkpoint lacks.
            TimeoutError: its file system does not answer.
        """
        check_loggers(self.config.logger)
        try:
            make_folder(self.path)
            # Before the first file is written: it may have the name of another's.
            if not is_run_folder(self.path) and (strangers := find_strangers(self.path, "", {}, is_damaged)):
                raise ValueError(strangers)
            self._ownership.take()
            kill_point("start")
            self._check_start()
            write_mark(self.path, Mark(self.checkpoints.run, 0))
            kill_point("start")
            within(WRITE_TIMEOUT_S, f"mkdir of {self.log_folder}", self._make_log_folder)
            self.checkpoints.remove_unfinished()
        except TimeoutError:
            raise
        except ValueError:
            self._ownership.give_back()
            raise
        except OSError as error:
            self._ownership.give_back()
            raise ValueError(
                f"checkpointing.checkpoint_dir={self.path} cannot be written: {error}; "
                f"{way_out(error, self.path) or 'choose another folder'}"
            ) from error
        logger.info("Using log directory: %s", self.log_folder)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.end()
        if kind is not None and issubclass(kind, TimeoutError) and is_waiting():
            return
        self.finish_texts()
        if self._metrics is not None and kind is not FolderLost:
            self._render_report("over")
        if self._metrics is not None:
            with self._may_fail(METRICS):
                self._metrics.close()
        spans.stop()
        with self._may_fail(OWNER):  # which names a process that is dead soon
            self.give_back()

    def note_attempt(self, left_out: Sequence[LeftOut] = ()) -> None:
        """Writes what describes an attempt that is about to train: config, command, inputs and left-out rows."""
        for line in attempt_changes(self.path, self.config):
            logger.info("Config since the last attempt: %s", line)
        kill_point("start")
        self.write_config(self.path, self.log_folder)
        about = json.dumps(about_this_attempt(self.config))
        for folder in (self.path, self.log_folder):
            write_atomic(folder / ABOUT, about)
        if self._identity is not None:
            write_atomic(self.path / IDENTITY, json.dumps(self._identity, indent=1))
        with self._may_fail("quarantine"):
            within(WRITE_TIMEOUT_S, "write of quarantine", write_quarantine, left_out, self.path / "quarantine")
        spans.record_in(self.log_folder / "actors" / f"driver{spans.SUFFIX}")
        self.next_metrics[ATTEMPT] = float(self.log_folder.name[4:])

    def write_config(self, *folders: Path) -> None:
        """Writes the resolved config into folders of the run."""
        for folder in folders:
            write_atomic(folder / RUN_CONFIG, resolved_yaml(self.config))

    def note_end(self, code: int, text: str) -> None:
        """Writes the exit code of this attempt and how it ended for `mrl runs`, if its folder is still there."""
        file = self.log_folder / ENDED

        def write() -> None:
            if file.parent.is_dir() and not file.exists():  # the first end counts: a later run may end this process
                if not (file.parent / RUN_CONFIG).exists():  # refused before it was noted
                    self.write_config(file.parent)
                write_atomic(file, json.dumps({"code": code, "text": text, "at": time.time()}))

        try:
            with self._may_fail(ENDED):
                within(END_S, f"write of {file}", write)
        except TimeoutError as error:
            logger.warning("%s", error)

    def note_complete(self) -> None:
        """Writes for `mrl runs` that no step is left; see `end_as_complete`."""
        with self._may_fail(ENDED):
            end_as_complete(self.path)

    def note_masked(self, reasons: Mapping[Status, str]) -> None:
        """Writes the reasons of each kind of this attempt's masked rollouts, without secrets, if there are new ones."""
        if reasons != self._masked:
            self._masked = dict(reasons)
            with self._may_fail(MASKED):
                said = {kind: without_secrets(reason) for kind, reason in reasons.items()}
                write_atomic(self.log_folder / MASKED, json.dumps(said))

    def check_owner(self) -> None:
        """Raises FolderLost if another process owns the folder by now."""
        self._ownership.check()

    def give_back(self) -> None:
        """Gives up ownership of the folder, also for a process that ends at once."""
        self._ownership.give_back()

    def _next_log_folder(self) -> Path:
        log_dir = Path(self.config.logger.log_dir).absolute()
        names = [path.name[4:] for folder in (log_dir, self._attempts) for path in folder.glob("exp_*")]
        return log_dir / f"exp_{max((int(name) for name in names if name.isdecimal()), default=0) + 1:03d}"

    def _make_log_folder(self) -> None:
        """Makes the attempt's folder, no other run's; if elsewhere, `logs` in the run folder gets a link to it."""
        while True:
            try:
                self.log_folder.mkdir(mode=0o700, parents=True)
                (self.log_folder / "actors").mkdir()
                break
            except FileExistsError:  # of another run, by now
                self.log_folder = self._next_log_folder()
        link = self._attempts / self.log_folder.name
        if not link.exists():
            self._attempts.mkdir(exist_ok=True)
            with self._may_fail(str(link)):
                link.symlink_to(os.path.relpath(self.log_folder.resolve(), self._attempts.resolve()))

    def _check_start(self) -> None:
        """Refuses a folder of another run, unchanged; else opens the ledger and sets damaged checkpoints aside."""
        self.ledger = Ledger(self.path / LEDGER, check_owner=self._ownership.check)
        self.checkpoints.run = run = find_run(self.path, self.ledger.state.saved)
        if strangers := find_strangers(self.path, run, self.ledger.state.saved, is_damaged):
            raise ValueError(strangers)
        self.checkpoints.run = run or new_id()
        self._refuse_to_begin_anew()
        for name in (RUN_CONFIG, ABOUT, IDENTITY):
            read_or_set_aside(self.path / name)
        if self._identity is not None:
            if resumes_at := newest_step(self.path):
                check_models(Checkpoint(resumes_at, self.path / f"step_{resumes_at}"), self.config)
            allowed = self.config.checkpointing.allow_changes
            check_identity(self.path / IDENTITY, self._identity, allowed=allowed, resumes_at=resumes_at)
        place = _place(self.checkpoints.newest(sets_aside=True))
        obstacle = self.ledger.find_obstacle(*place) if self.ledger.damage else self.ledger.find_stranger(*place)
        if obstacle:
            raise ValueError(obstacle)

    def _refuse_to_begin_anew(self, *, before: float = math.inf) -> None:
        if lost := find_lost_run(self.path, before=before):
            raise NoWholeCheckpoint(lost)
        if gone := find_gone(self.path, self.ledger, allowed=self.config.checkpointing.allow_changes):
            raise NoWholeCheckpoint(gone)

    def pass_over(self, checkpoint: Checkpoint, damage: str) -> Checkpoint | None:
        """Sets a damaged checkpoint aside and finds the newest one before it."""
        self.checkpoints.set_aside(checkpoint, damage)
        return self.newest_checkpoint(before=checkpoint.step)

    def newest_checkpoint(self, *, before: float = math.inf) -> Checkpoint | None:
        """Finds the newest complete checkpoint, sets damaged ones before it aside, and opens the metrics.

        The content of its shards is for those who load it to check; `resume_from` comes then. NoWholeCheckpoint: all
        that there are turn out to be damaged, or of another run than the ledger.
        """
        self._refuse_to_begin_anew(before=before)
        newest = self.checkpoints.newest(before=before, sets_aside=True)
        if obstacle := self.ledger.find_obstacle(*_place(newest)):
            raise NoWholeCheckpoint(obstacle)
        if self._metrics is None:
            self._last_logged_step = last_step_in(self.path / METRICS)
            self._metrics = JsonlLogger(self.path / METRICS)
        return newest

    def resume_from(self, checkpoint: Checkpoint | None) -> None:
        """Takes ledger, metrics and samples back to a checkpoint whose every byte was compared; None: to the start."""
        assert self._metrics is not None, "newest_checkpoint comes first"
        if checkpoint is None:
            self._keep_earlier()
        self.ledger.roll_back(*_place(checkpoint))
        if checkpoint is not None:
            self.note_saved(checkpoint)
        kill_point("fallback")
        last_step = checkpoint.step if checkpoint else -1
        drop_later_steps(self.path / SAMPLES, last_step)
        self._metrics.close()
        logged = drop_later_steps(self.path / METRICS, last_step)
        self._metrics = JsonlLogger(self.path / METRICS)
        if checkpoint is not None and checkpoint.step not in logged:  # killed between the checkpoint and its line
            self._metrics.log(checkpoint.state().metrics, checkpoint.step)
        if lost := sorted(set(range(1, last_step)) - logged):
            steps = f"{len(lost)} steps, {lost[0]} to {lost[-1]}" if len(lost) > 1 else f"step {lost[0]}"
            logger.warning("%s has no lines of %s: they are lost", self.path / METRICS, steps)

    def _keep_earlier(self) -> None:
        """Copies the metrics and samples of steps that the run makes again from its start into the log folder."""
        if self.ledger.state.trained:
            logger.warning("%s has %d steps without a checkpoint", self.ledger.path, len(self.ledger.state.trained))
        for path in (self.path / METRICS, self.path / SAMPLES):
            if path.is_file() and path.stat().st_size:
                kept = self.log_folder / f"earlier_{path.name}"
                within(IO_TIMEOUT_S, f"copy of {path}", shutil.copyfile, path, kept)
                sync_file(kept)
                logger.warning("The run begins at step 0; a copy of %s is kept: %s", path, kept)

    def note_saved(self, checkpoint: Checkpoint) -> None:
        """Records a published checkpoint in the ledger, by its mark."""
        if (mark := checkpoint.mark) is not None:
            self.ledger.save(replace(mark, run=self.checkpoints.run, step=checkpoint.step))

    def sync(self) -> None:
        """Forces the run's appended lines and texts to disk, before a checkpoint of these steps is published."""
        for path in (self.path / METRICS, self.path / SAMPLES, self.log_folder):
            with self._may_fail(path.name):
                if path.exists():
                    sync_file(path)

    @contextmanager
    def open_loggers(self) -> Iterator[Loggers]:
        """Opens enabled loggers. They get everything logged in the `with` block, which ends when they have sent it."""
        self._loggers = Loggers(
            self.config, run_folder=self.path, log_folder=self.log_folder, last_step=self._last_logged_step
        )
        try:
            yield self._loggers
        finally:
            self._loggers.close()
            self._loggers = None

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step's metrics and hands them to loggers; after a validation or a checkpoint renews the report."""
        assert self._metrics is not None, "newest_checkpoint comes first"
        metrics, self.next_metrics = {**metrics, **self.next_metrics}, {}
        started = time.monotonic()
        num_lost = self._failed_writes.total() + (self._loggers.num_lost if self._loggers is not None else 0)
        if num_lost:
            metrics = {**metrics, "logger/lost": float(num_lost)}
        with self._may_fail(METRICS):
            self._metrics.log(metrics, step)
        if self._loggers is not None:
            self._loggers.log(metrics, step)
        if "time/checkpoint" in metrics or any(name.startswith("val/") for name in metrics):
            self._render_report("running")
        self._count_logging(started)

    def _count_logging(self, started: float) -> None:
        # A line of metrics cannot hold how long it takes itself.
        spent_s = self.next_metrics.get("time/logging", 0.0) + time.monotonic() - started
        self.next_metrics["time/logging"] = spent_s
        spans.add("logging", started)

    def measured(self, name: str, *, num_steps: int) -> float | None:
        """The mean of a metric over the last steps that have it, or None."""
        rows, _ = read_rows(self.path / METRICS, METRIC_KEYS, last_bytes=MEASURED_BYTES)
        values = [row[name] for row in rows if row.get(name) is not None]
        return statistics.fmean(values[-num_steps:]) if values else None

    def log_samples(
        self,
        step: int,
        split: Split,
        groups: Sequence[RolloutGroup],
        sequences: Sequence[TrainSequence] = (),
        tokens: TokenSamples | None = None,
    ) -> None:
        """Writes step rollouts as text; validation shows `logger.num_val_samples_to_print`. See `write_step_data`."""
        started = time.monotonic()
        with self._may_fail(SAMPLES):
            path = self.path / SAMPLES
            within(WRITE_TIMEOUT_S, f"write of {path}", append_report_samples, path, step, split, groups)
        self.finish_texts()
        self._texts = self._writer.begin(self._write_texts, step, split, groups, sequences, tokens or {})
        if split == "validation":
            shown = best_and_worst(groups, self.config.logger.num_val_samples_to_print)
            for line in sample_lines(shown, step):
                story.info("%s", line)
            if self._loggers is not None:
                self._loggers.log_samples(shown, step)
        self._count_logging(started)

    def note_refit(self, described: Mapping[str, object]) -> None:
        """Writes `refit.json`, which the page shows."""
        with self._may_fail(REFIT):
            write_atomic(self.path / REFIT, json.dumps(described))

    def _write_texts(
        self,
        step: int,
        split: Split,
        groups: Sequence[RolloutGroup],
        sequences: Sequence[TrainSequence],
        tokens: TokenSamples,
    ) -> None:
        with self._may_fail("the files *_data_stepN.jsonl.gz"), spans.span("write texts", "writer of texts"):
            drop_old_step_data(self._attempts, step, self.config.logger)
            rows = {name: token_rows(samples, self._tokenizer) for name, samples in tokens.items() if samples}
            write_step_data(self.log_folder, step, split, groups, sequences, self.config.logger, rows)

    def finish_texts(self) -> None:
        """Waits until the rollouts of all steps so far are written."""
        texts, self._texts = self._texts, None
        if texts is not None:
            with self._may_fail("the files *_data_stepN.jsonl.gz"):
                self._writer.take(texts, WRITE_TIMEOUT_S, f"write of a step's rollouts to {self.log_folder}")

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.policy.tokenizer.name)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[RolloutGroup],
        sequences: Sequence[TrainSequence],
        tokens: TokenSamples,
    ) -> None:
        """Prints a step's metrics, and writes them and its rollouts, if it had any; `tokens` by request id."""
        grpo = self.config.rollouts
        if self.config.has_engines:
            sizes = {"num_prompts": grpo.num_prompts_per_step, "num_generations": grpo.num_generations_per_prompt}
            lines = step_lines(metrics, **sizes, has_kl=self.config.has_kl)
        else:
            lines = supervised_lines(metrics)
        for line in lines:
            story.info("%s", line)
        for advisory in self._advisor.new({"step": float(step), **metrics}):
            story.warning("%s", advisory.line())
        if groups:
            self.log_samples(step, "train", groups, sequences, tokens)
        self.log_metrics(step, metrics)

    def print_header(self, step: int, last_step: int) -> None:
        story.info("\n%s", step_header(step, last_step))

    def copy_identity(self, checkpoint: Checkpoint) -> None:
        """Puts model, tokenizer and data of the run, by their checksums, into a checkpoint."""
        if self._identity is not None:
            path, text = checkpoint.folder / IDENTITY, json.dumps(self._identity)
            within(WRITE_TIMEOUT_S, f"write of {path}", path.write_text, text, encoding="utf-8")

    def copy_tokenizer(self, checkpoint: Checkpoint, model: ModelName = "policy") -> None:
        """Puts the files of `COPIED` next to the weights of a model, so that it can be exported on its own."""
        source, target = Path(self.config.policy.tokenizer.name), checkpoint.weights_of(model).parent / "tokenizer"
        within(IO_TIMEOUT_S, f"copy of the tokenizer to {target}", self._copy_tokenizer, source, target, model)

    def _copy_tokenizer(self, source: Path, target: Path, model: ModelName) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
            (target / path.relative_to(source)).parent.mkdir(exist_ok=True)
            shutil.copy2(path, target / path.relative_to(source))
        # Generation settings and code go with the weights, wherever the tokenizer is from.
        copy_companions(Path(self.config.model(model).model_name), target, OF_THE_MODEL)
        if self.config.policy.tokenizer.chat_template != OWN_TEMPLATE:
            (target / "chat_template.jinja").write_text(
                template_text(self.config.policy.tokenizer.chat_template), encoding="utf-8"
            )

    def _render_report(self, state: State) -> None:
        started = time.monotonic()
        if state == "running" and started < self._next_report:
            return
        self.finish_texts()
        with self._may_fail(REPORT):
            within(WRITE_TIMEOUT_S, f"write of {self.path / REPORT}", write_report, self.path / REPORT, state=state)
        ended = time.monotonic()
        self._next_report = ended + (ended - started) / MAX_REPORT_SHARE

    @contextmanager
    def _may_fail(self, what: str) -> Iterator[None]:
        """Wraps writes that a run can do without: an error costs those lines, which are counted, and one warning."""
        try:
            yield
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            self._failed_writes[what] += 1
            if self._failed_writes[what] == 1:
                logger.warning(
                    "%s cannot be written, and the run goes on without it: %s. logger/lost counts losses", what, error
                )


def _place(checkpoint: Checkpoint | None) -> tuple[int, Path | None]:
    return (checkpoint.step, checkpoint.ledger) if checkpoint is not None else (0, None)
