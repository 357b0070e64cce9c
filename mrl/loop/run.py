"""A run: what the loop in `mrl.train` works with, and when it validates, saves and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mrl.capacity.phases import Phase
from mrl.cluster.policy_group import PolicyGroup
from mrl.config.schema.run import RunConfig
from mrl.loop.budget import Budget
from mrl.loop.saving import CheckpointSaver
from mrl.store.clock import Clock
from mrl.store.run_folder import RunFolder
from mrl.types import Batch, PromptKey, RolloutGroup, RunState, TrainSequence


@dataclass(frozen=True)
class StepData:
    """What one step trains on."""

    batches: Sequence[Batch]
    """One for each optimizer update, in order."""
    trained: Sequence[PromptKey]
    dropped: Sequence[PromptKey]
    """Prompts that the step consumes without training on them."""
    metrics: dict[str, float]
    groups: Sequence[RolloutGroup] = ()
    sequences: Sequence[TrainSequence] = ()


class Supplier(Protocol):
    """What differs between training on rollouts and on examples."""

    def start(self) -> None:
        """Readies the ranks and engines, which hold the starting weights."""
        ...

    def take(self, state: RunState, clock: Clock) -> StepData | None:
        """The data of the step after `state`; None if the prompts are used up."""
        ...

    def enter(self, phase: Phase) -> None:
        """Brings the policy, and engines that share its devices, into a phase."""
        ...

    def refit(self, state: RunState) -> dict[str, float]:
        """Moves the policy's weights into every engine and verifies them there; `state` gets the new weight version."""
        ...

    def validate(self, state: RunState) -> dict[str, float]:
        """Metrics on held-out data; empty if there are none."""
        ...


S_co = TypeVar("S_co", bound=Supplier, covariant=True)


@dataclass
class Run(Generic[S_co]):
    """What one run works with."""

    config: RunConfig
    folder: RunFolder
    policies: PolicyGroup
    supplier: S_co
    saver: CheckpointSaver
    budget: Budget
    last_step: int
    is_over: bool = False
    """Whether no further step is made."""

    def is_validation_due(self, step: int) -> bool:
        """Whether the run validates after `step`."""
        training = self.config.training
        first = self.config.grpo.val_start_at if self.config.has_engines else 0
        return (step >= first and is_due(step, training.val_period)) or (training.val_at_end and step == self.last_step)

    def is_save_due(self, step: int) -> bool:
        """Whether the run saves a checkpoint after `step`, which may be its last."""
        section = self.config.checkpointing
        return section.enabled and (self.is_over or is_due(step, section.save_period) or is_due(step, section.ft_save_period or 0))


def is_due(step: int, period: int) -> bool:
    """Whether something that happens every `period` steps happens at `step`; a period of 0 is never."""
    return period > 0 and step % period == 0
