"""The run folder: one owner at a time; checkpoints, ledger, metrics, resolved config and report of a run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from conversion.files import write_atomic
from mrl.config.redact import resolved_yaml
from mrl.config.schema import RunConfig
from mrl.data.chat import OWN_TEMPLATE, template_text
from mrl.store.checkpoints import Checkpoint, CheckpointStore
from mrl.store.console import step_header, step_lines, supervised_lines
from mrl.store.ledger import Ledger
from mrl.store.metrics import JsonlLogger, Logger, TensorBoardLogger, drop_later_steps
from mrl.store.ownership import Ownership
from mrl.store.report import write_report
from mrl.types import RolloutGroup

logger = logging.getLogger(__name__)

OWNER = "owner.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
REPORT = "report.html"


class RunFolder:
    """`open` makes this process the owner of `checkpointing.checkpoint_dir`; as a context manager it gives the folder back at the end."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.checkpointing.checkpoint_dir).absolute()
        self.log_folder = self._next_log_folder(Path(config.logger.log_dir).absolute())
        self._ownership = Ownership(self.path / OWNER)
        self.checkpoints = CheckpointStore(self.path, config.checkpointing, check_owner=self._ownership.check)
        self._loggers: list[Logger] = []

    def open(self) -> None:
        """Takes the folder over, and removes what an interrupted attempt left unfinished.

        Raises:
            ValueError: a living process owns the folder, it cannot be written, or its ledger is damaged.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._ownership.take()
            self.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"checkpointing.checkpoint_dir={self.path} cannot be written: {error}; choose another folder") from error
        self.checkpoints.remove_unfinished()
        self.ledger = Ledger(self.path / "ledger.jsonl", check_owner=self._ownership.check)
        write_atomic(self.path / "config.yaml", resolved_yaml(self.config))
        logger.info("Using log directory: %s", self.log_folder)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._loggers:
            sink.close()
        self._ownership.give_back()

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint; what it supersedes leaves ledger and metrics, and metrics are open afterwards."""
        newest = self.checkpoints.newest()
        self.ledger.roll_back(newest.step if newest else 0)
        # Without a checkpoint, step 0 is validated again too.
        last_step = newest.step if newest else -1
        drop_later_steps(self.path / SAMPLES, last_step)
        has_metrics = drop_later_steps(self.path / METRICS, last_step)
        self._loggers.append(JsonlLogger(self.path / METRICS))
        if newest is not None and not has_metrics:  # killed between the checkpoint and its line
            self._loggers[0].log(newest.state().metrics, newest.step)
        if self.config.logger.tensorboard_enabled:
            self._loggers.append(TensorBoardLogger(self.log_folder))
        return newest

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands one step's metrics to every logger and renews the report."""
        for sink in self._loggers:
            sink.log(metrics, step)
        write_report(self.path / REPORT, metrics_file=self.path / METRICS, samples_file=self.path / SAMPLES, title=self.path.name)

    def log_samples(self, step: int, split: str, groups: Sequence[RolloutGroup]) -> None:
        """Keeps the first rollout of some groups as text, for the report."""
        with (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            for group in groups:
                verdict = group.verdicts[0]
                row = {
                    "step": step,
                    "split": split,
                    "prompt": group.prompt.text,
                    "expected": group.prompt.expected_answer,
                    "text": verdict.text,
                    "extracted": verdict.extracted,
                    "reward": verdict.reward,
                    "status": verdict.status,
                }
                file.write(json.dumps(row) + "\n")

    def print_header(self, step: int, last_step: int) -> None:
        """The step line."""
        logger.info("\n%s", step_header(step, last_step))

    def print_step(self, metrics: Mapping[str, float]) -> None:
        """The block below the step line."""
        grpo = self.config.grpo
        if self.config.has_engines:
            lines = step_lines(metrics, num_prompts=grpo.num_prompts_per_step, num_generations=grpo.num_generations_per_prompt)
        else:
            lines = supervised_lines(metrics)
        for line in lines:
            logger.info("%s", line)

    def copy_tokenizer(self, checkpoint: Checkpoint) -> None:
        """Puts the tokenizer's files beside the weights, so that a checkpoint can be exported on its own."""
        target = checkpoint.folder / "policy" / "tokenizer"
        target.mkdir(parents=True, exist_ok=True)
        for path in Path(self.config.policy.tokenizer.name).iterdir():
            if path.is_file() and path.suffix not in (".safetensors", ".bin"):
                shutil.copy2(path, target / path.name)
        if self.config.policy.tokenizer.chat_template != OWN_TEMPLATE:
            # Where transformers looks first. What was learned by this template is to be asked by it.
            (target / "chat_template.jinja").write_text(template_text(self.config.policy.tokenizer.chat_template), encoding="utf-8")

    @staticmethod
    def _next_log_folder(log_dir: Path) -> Path:
        taken = [int(path.name[4:]) for path in log_dir.glob("exp_*") if path.name[4:].isdigit()]
        return log_dir / f"exp_{max(taken, default=0) + 1:03d}"
