# SPDX-License-Identifier: Apache-2.0
"""Environments in an actor of their own: it makes and judges texts next to the payload, and the driver sees verdicts.

If rollouts may have several turns, the actor also decides after each turn whether another one follows, and makes its transcript.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import ray

from mrl.cluster.calls import Background, ask, fetch, start_actor, wait_all
from mrl.cluster.environment import start_actor_process
from mrl.cluster.payload import PayloadRef, pack, pull
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import start_deadline
from mrl.config.rules.data import NEMO_GYM
from mrl.config.schema.run import RunConfig
from mrl.data.turns import Ending, TurnFormat
from mrl.envs.endpoints import FILE_NAME
from mrl.envs.inspection import Remarks, amend, inspect, rules_of
from mrl.types import Prompt, Rollout, RolloutInfo, Transcript, Verdict

T = TypeVar("T")
NAME = "reward actor"
# After this share of the driver's deadline the actor masks answers that wait behind others that hang, so that they never end the run.
PATIENCE_SHARE = 0.8
# How long the actor waits for a verdict before it answers that there is none; it does nothing else meanwhile.
POLL_BUDGET_S = 0.1


class RewardActor:
    """Decodes rollouts and asks their environment for a verdict."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        from mrl.data.chat import load_tokenizer, use_chat_template

        self.deadlines = config.deadlines
        self.max_turns = config.max_rollout_turns
        self.max_model_len = config.policy.generation.vllm_cfg.max_model_len
        self.tokenizer = load_tokenizer(config.policy.tokenizer.name)
        use_chat_template(self.tokenizer, config.policy.tokenizer)
        self.format = TurnFormat(self.tokenizer, template_kwargs=config.policy.tokenizer.chat_template_kwargs)
        self.rules = rules_of(config, self.decode, self.tokenizer.all_special_tokens)
        self._remarks: dict[str, Remarks] = {}
        self.undecided: dict[str, Rollout] = {}
        self.config = config
        has_servers = config.policy.generation.vllm_cfg.expose_http_server
        self.endpoints = log_file.parent / FILE_NAME if has_servers else None

    def ready(self) -> None:
        """Starts the environments, and returns once they are up; a user's function that cannot be imported ends it."""
        from mrl.envs.scorer import Scorer, build_environment

        config = self.config
        # Environments that users name start now; those that come with mrl start when the first row needs them.
        names = dict.fromkeys((*config.env.own.functions, *({config.data.default.env_name} - {NEMO_GYM})))
        self.scorer = Scorer(
            lambda name: build_environment(name, config.env, endpoints=self.endpoints),
            list(names),
            timeout_s=start_deadline(config).seconds,
            masks_flagged=config.env.should_mask_flagged_samples,
            keeps_fresh=self.max_turns > 1,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids)))

    def submit(self, infos: Sequence[RolloutInfo], prompts: Sequence[Prompt]) -> None:
        """Hands rollouts to their environments; `prompts[i]` is the prompt of `infos[i]`."""
        from mrl.envs.scorer import Answer
        from mrl.envs.task import Task

        rollouts = pull(infos, timeout_s=self.deadlines.reward_s)
        answers = []
        for info, rollout, prompt in zip(infos, rollouts, prompts, strict=True):
            if self.rules is not None:
                self._remarks[info.request_id] = inspect(rollout, self.decode, self.rules)
            if self.max_turns > 1:
                self.undecided[info.request_id] = rollout
            task = Task(self.format.texts(rollout), prompt.expected_answer, prompt.text, prompt.row)
            answers.append(Answer(info.request_id, prompt.env_name, task))
        self.scorer.submit(answers)

    def decide(self, timeout_s: float) -> tuple[list[tuple[str, Ending | None]], list[bytes]]:
        """Decisions on turns judged since the last call, waiting up to `timeout_s` for the first: `(request id, why the rollout ends)`.

        The second list has the packed transcripts of those that go on (None in the first), in the same order.
        """
        decisions: list[tuple[str, Ending | None]] = []
        transcripts: list[Transcript] = []
        for request_id, verdict in self.scorer.take_fresh(timeout_s).items():
            rollout = self.undecided.pop(request_id)
            following = self.format.next_turn(rollout, verdict, max_turns=self.max_turns, max_model_len=self.max_model_len)
            if isinstance(following, Transcript):
                transcripts.append(following)
            decisions.append((request_id, None if isinstance(following, Transcript) else following))
        return decisions, pack(transcripts)

    def collect(self) -> tuple[Mapping[str, Verdict], float]:
        verdicts, seconds = self.scorer.collect(patience_s=PATIENCE_SHARE * self.deadlines.reward_s, timeout_s=self.deadlines.reward_s)
        remarks, self._remarks = self._remarks, {}
        return {name: amend(verdict, remarks[name]) if name in remarks else verdict for name, verdict in verdicts.items()}, seconds

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        return function(self, *arguments)


class Rewards:
    """The driver's handle on the reward actor, which scores while engines generate. `beside` goes on while the driver waits for it."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path) -> None:
        self.start_s, self.reward_s = start_deadline(config).seconds, config.deadlines.reward_s
        self.beside: Background | None = None
        self.decides = config.max_rollout_turns > 1
        """Whether rollouts may have several turns: then the actor decides after each one."""
        self.actor = start_actor(RewardActor, placement.options(0, {}), config, log_folder / "rewards.log")
        self._ready = ask(self.actor, RewardActor.ready)
        self._submitted: list[ray.ObjectRef[None]] = []
        self._undecided: set[str] = set()
        self._poll: tuple[ray.ObjectRef[list[tuple[str, Ending | None]]], ray.ObjectRef[list[bytes]]] | None = None

    @property
    def num_undecided(self) -> int:
        """Turns without a decision yet on whether another one follows; 0 where rollouts have one turn."""
        return len(self._undecided)

    def wait_until_built(self) -> None:
        wait_all({NAME: self._ready}, deadline_s=self.start_s, what="start")

    def submit(self, infos: list[RolloutInfo], prompts: list[Prompt]) -> None:
        """Starts scoring; does not wait."""
        self._submitted.append(ask(self.actor, RewardActor.submit, infos, prompts))
        if self.decides:
            self._undecided.update(info.request_id for info in infos)

    def references(self) -> list[ray.ObjectRef]:
        """The call that becomes ready when `take_ready` may have something to give; none if nothing is undecided."""
        if self._undecided and self._poll is None:
            decide = getattr(self.actor, RewardActor.decide.__name__)
            self._poll = cast("tuple[ray.ObjectRef, ray.ObjectRef]", decide.options(num_returns=2).remote(POLL_BUDGET_S))
        return [] if self._poll is None else [self._poll[0]]

    def take_ready(self) -> list[tuple[str, PayloadRef | Ending]]:
        """Decisions since the last call, by request id: a reference to the next turn's `Transcript`, or why the rollout ends."""
        references = self.references()
        if self._poll is None or not ray.wait(references, num_returns=1, timeout=0.0)[0]:
            return []
        (reference, payload), self._poll = self._poll, None
        decisions = fetch(reference, actor=NAME, what="turns")
        self._undecided.difference_update(request_id for request_id, _ in decisions)
        indices = itertools.count()
        return [(request_id, ending or PayloadRef(payload, next(indices))) for request_id, ending in decisions]

    def collect(self) -> tuple[Mapping[str, Verdict], float]:
        """Verdicts on everything submitted since the last call, by request id, and the seconds of scoring, waited for or not."""
        submitted, self._submitted = self._submitted, []
        pending: dict[str, ray.ObjectRef] = {f"{NAME}, batch {index}": reference for index, reference in enumerate(submitted)}
        # The actor takes calls in order, so that it answers this one last.
        pending[NAME] = ask(self.actor, RewardActor.collect)
        return wait_all(pending, deadline_s=self.reward_s, what="rewards", beside=self.beside)[NAME]

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(actor, *arguments)` in the actor's process: tests and diagnostics reach into it."""
        answer: ray.ObjectRef[T] = getattr(self.actor, RewardActor.apply.__name__).remote(function, *arguments)
        return wait_all({NAME: answer}, deadline_s=self.reward_s, what="apply")[NAME]
