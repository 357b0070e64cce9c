"""Environments in an actor of their own: text is made and judged next to the payload, the driver sees verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import ray

from mrl.cluster.lifetime import start_actor_process
from mrl.cluster.payload import pull
from mrl.cluster.placement import Placement
from mrl.cluster.waiting import Background, wait_all
from mrl.config import trace
from mrl.config.environments import NEMO_GYM
from mrl.config.schema import RunConfig
from mrl.envs.inspection import Remarks, amend, inspect, rules_of
from mrl.types import Prompt, RolloutInfo, Verdict

NAME = "reward actor"
# Answers behind others that hang are masked when this share of the driver's deadline is over, so that they never end the run.
PATIENCE_SHARE = 0.8


class RewardActor:
    """Decodes rollouts and asks their environment for a verdict."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        from mrl.data.chat import load_tokenizer
        from mrl.envs.registry import build_environment
        from mrl.envs.scorer import Scorer

        self.deadlines = config.deadlines
        self.tokenizer = load_tokenizer(config.policy.tokenizer.name)
        self.rules = rules_of(config, self.tokenizer.decode, self.tokenizer.all_special_tokens)
        self._remarks: dict[str, Remarks] = {}
        # What users name is tried now; what comes with mrl starts when the first row needs it.
        names = dict.fromkeys((*config.env.own.functions, *({config.data.default.env_name} - {NEMO_GYM})))
        self.scorer = Scorer(
            lambda name: build_environment(name, config.env),
            list(names),
            timeout_s=config.deadlines.start_s,
            masks_flagged=config.env.should_mask_flagged_samples,
        )

    def ready(self) -> None:
        """Returns once the environments are up."""

    def submit(self, infos: Sequence[RolloutInfo], prompts: Sequence[Prompt]) -> None:
        """Hands rollouts to their environments; `prompts[i]` is the prompt of `infos[i]`."""
        from mrl.envs.scorer import Answer
        from mrl.envs.task import Task

        rollouts = pull(infos, timeout_s=self.deadlines.reward_s)
        if self.rules is not None:
            self._remarks |= {rollout.request.request_id: inspect(rollout, self.tokenizer.decode, self.rules) for rollout in rollouts}
        texts: list[str] = self.tokenizer.batch_decode([rollout.token_ids.tolist() for rollout in rollouts], skip_special_tokens=True)
        self.scorer.submit(
            [
                Answer(info.request_id, prompt.env_name, Task((text,), prompt.expected_answer, prompt.text, prompt.row))
                for info, prompt, text in zip(infos, prompts, texts, strict=True)
            ]
        )

    def collect(self) -> tuple[Mapping[str, Verdict], float]:
        """Verdicts of everything submitted since the last call, by request id, and the seconds that they took, waited for or not."""
        verdicts, seconds = self.scorer.collect(patience_s=PATIENCE_SHARE * self.deadlines.reward_s, timeout_s=self.deadlines.reward_s)
        remarks, self._remarks = self._remarks, {}
        return {name: amend(verdict, remarks[name]) if name in remarks else verdict for name, verdict in verdicts.items()}, seconds

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(self, *arguments)`: tests and diagnostics reach into the actor with it."""
        return function(self, *arguments)

    def config_readers(self) -> trace.Readers:
        """Configuration keys that this process read."""
        return trace.readers()


class Rewards:
    """The driver's handle on the reward actor: scoring runs while generation goes on, and generation (`beside`) while the driver waits."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path) -> None:
        self.deadlines = config.deadlines
        actor_class = ray.remote(RewardActor).options(**placement.options(0, {}))
        self.actor = actor_class.remote(config, log_folder / "rewards.log")
        self.beside: Background | None = None
        self._submitted: list[ray.ObjectRef] = []

    def wait_until_built(self) -> None:
        """Waits for the actor and its environments."""
        wait_all({NAME: self.actor.ready.remote()}, deadline_s=self.deadlines.start_s, what="start")

    def submit(self, infos: list[RolloutInfo], prompts: list[Prompt]) -> None:
        """Starts scoring; does not wait."""
        self._submitted.append(self.actor.submit.remote(infos, prompts))

    def collect(self) -> tuple[Mapping[str, Verdict], float]:
        """Verdicts of everything submitted since the last call, by request id, and the seconds that they took, waited for or not."""
        submitted, self._submitted = self._submitted, []
        # The actor takes calls in order, so that the last one is answered last.
        pending: dict[str, ray.ObjectRef] = {f"{NAME}, batch {index}": reference for index, reference in enumerate(submitted)}
        pending[NAME] = self.actor.collect.remote()
        answers = wait_all(pending, deadline_s=self.deadlines.reward_s, what="rewards", beside=self.beside)
        return cast(tuple[Mapping[str, Verdict], float], answers[NAME])

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(actor, *arguments)` in the actor's process."""
        return wait_all({NAME: self.actor.apply.remote(function, *arguments)}, deadline_s=self.deadlines.reward_s, what="apply")[NAME]

    def config_readers(self) -> list[trace.Readers]:
        """Configuration keys that the actor read."""
        readers = wait_all({NAME: self.actor.config_readers.remote()}, deadline_s=self.deadlines.start_s, what="config_readers")
        return [cast(trace.Readers, readers[NAME])]
