"""Environments in an actor of their own: text is made and judged next to the payload, the driver sees verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import ray

from mrl.cluster.lifetime import start_actor_process
from mrl.cluster.payload import pull
from mrl.cluster.placement import Placement
from mrl.cluster.waiting import wait_all
from mrl.config import trace
from mrl.config.schema import RunConfig
from mrl.types import Prompt, RolloutInfo, Verdict

NAME = "reward actor"
# Answers that hang are masked when this share of the driver's deadline is over, so that they never end the run.
DEADLINE_SHARE = 0.8


class RewardActor:
    """Decodes rollouts and asks their environment for a verdict."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        from mrl.data.chat import load_tokenizer
        from mrl.envs.registry import build_environments

        self.config = config
        self.tokenizer = load_tokenizer(config.policy.tokenizer.name)
        self.environments = build_environments(config.env)

    def ready(self) -> None:
        """Returns once the environments are up."""

    def score(self, infos: Sequence[RolloutInfo], prompts: Sequence[Prompt]) -> list[Verdict]:
        """One verdict per rollout, in order; `prompts[i]` is the prompt of `infos[i]`."""
        rollouts = pull(infos, timeout_s=self.config.deadlines.reward_s)
        texts: list[str] = self.tokenizer.batch_decode([rollout.token_ids.tolist() for rollout in rollouts], skip_special_tokens=True)
        verdicts: dict[int, Verdict] = {}
        for env_name in dict.fromkeys(prompt.env_name for prompt in prompts):
            indices = [i for i, prompt in enumerate(prompts) if prompt.env_name == env_name]
            scored = self.environments[env_name].score(
                [(texts[i], prompts[i].expected_answer) for i in indices], timeout_s=DEADLINE_SHARE * self.config.deadlines.reward_s
            )
            verdicts.update(zip(indices, scored, strict=True))
        return [verdicts[i] for i in range(len(infos))]

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(self, *arguments)`: tests and diagnostics reach into the actor with it."""
        return function(self, *arguments)

    def config_reads(self) -> set[str]:
        """Configuration keys that this process read."""
        return trace.reads()


class Rewards:
    """The driver's handle on the reward actor: scoring runs while generation goes on."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path) -> None:
        self.deadlines = config.deadlines
        actor_class = ray.remote(RewardActor).options(**placement.options(0, {}))
        self.actor = actor_class.remote(config, log_folder / "rewards.log")
        self._pending: list[tuple[list[RolloutInfo], ray.ObjectRef]] = []

    def wait_until_built(self) -> None:
        """Waits for the actor and its environments."""
        wait_all({NAME: self.actor.ready.remote()}, deadline_s=self.deadlines.start_s, what="start")

    def submit(self, infos: list[RolloutInfo], prompts: list[Prompt]) -> None:
        """Starts scoring; does not wait."""
        self._pending.append((infos, self.actor.score.remote(infos, prompts)))

    def collect(self) -> dict[str, Verdict]:
        """Verdicts of everything submitted since the last call, by request id."""
        pending, self._pending = self._pending, []
        results = wait_all(dict(enumerate(reference for _, reference in pending)), deadline_s=self.deadlines.reward_s, what="rewards")
        verdicts: dict[str, Verdict] = {}
        for index, (infos, _) in enumerate(pending):
            scored = cast(list[Verdict], results[index])
            verdicts.update((info.request_id, verdict) for info, verdict in zip(infos, scored, strict=True))
        return verdicts

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(actor, *arguments)` in the actor's process."""
        return wait_all({NAME: self.actor.apply.remote(function, *arguments)}, deadline_s=self.deadlines.reward_s, what="apply")[NAME]

    def config_reads(self) -> set[str]:
        """Configuration keys that the actor read."""
        reads = wait_all({NAME: self.actor.config_reads.remote()}, deadline_s=self.deadlines.start_s, what="config_reads")
        return cast(set[str], reads[NAME])
