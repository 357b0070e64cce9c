# SPDX-License-Identifier: Apache-2.0
"""Environments in their own actors, one per node: they make and judge texts near the payload; the driver sees verdicts.

If rollouts may have several turns, an actor also decides after each turn whether another one follows, and makes its
transcript. No actor knows of the others, and a verdict follows from the rollout alone: the driver gives each rollout to
the actor with the fewest unfinished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray

from conversion.texts import listed
from mrl import spans
from mrl.cluster import hangs
from mrl.cluster.calls import ask, start_actor
from mrl.cluster.environment import start_actor_process
from mrl.cluster.errors import DeadlineExceeded
from mrl.cluster.payload import Packed, pack, pull
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import num_gateways
from mrl.cluster.service import ANSWER_S, LOOK_S, NUM_THREADS, REWARDS, STUCK_S, Service
from mrl.cluster.tasks import VERDICTS, ActorWork, BackgroundTasks, Silence, wait_in_loop
from mrl.cluster.traces import Traces
from mrl.config.rules.data import NEMO_GYM, parts_at_work
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rollout_name, rounded
from mrl.data.turns import Ending, TurnFormat
from mrl.envs.endpoints import FILE_NAME
from mrl.envs.inspection import Remarks, amend, inspect, inspect_all, looks_for_faults, rules_of
from mrl.envs.scorer import RewardLoad, RewardPool, Scorer, goes_last, parsers_of, start_environment
from mrl.envs.task import Task
from mrl.envs.workers import describe_workers, longest_verdict_s, num_workers, usable_cores
from mrl.plan.deadlines import start_deadline
from mrl.types import PayloadRef, Prompt, Rollout, RolloutInfo, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Verdicts that come within so long of the first are answered together: a step needs all of them, a rollout of several
# turns its own.
GATHER_S, TURN_GATHER_S = 0.1, 0.02
# Texts are made of so many rollouts at once; children begin the first ones meanwhile.
NUM_TOGETHER = 32

Unjudged = tuple[RolloutInfo, Prompt, Verdict | None]
"""A rollout, and the verdict of the agent that has done it, which is only amended by faults of form."""
Ended = tuple[Verdict, Ending]
"""The verdict on a rollout that has ended, and why it has."""
Judged = tuple[dict[str, Ended], list[str], RewardLoad]
"""Verdicts of an actor since its last answer: rollouts that have ended, by request id, and those that go on, in the
order of their packed transcripts."""


class Judge:
    """Judges rollouts, each in a coroutine, from text to verdict or transcript of its next turn, in `event_loop`."""

    def __init__(self, config: RunConfig, endpoints: Path | None) -> None:
        from mrl.data.chat import load_tokenizer, use_chat_template
        from mrl.data.prompts import end_token_ids

        self.config = config
        self.endpoints = endpoints
        self.max_turns = config.max_rollout_turns
        self.max_model_len = config.policy.generation.vllm_cfg.max_model_len
        tokenizer = load_tokenizer(config.policy.tokenizer.name)
        use_chat_template(tokenizer, config.policy.tokenizer)
        template_kwargs, end_ids = config.policy.tokenizer.chat_template_kwargs, end_token_ids(config.policy, tokenizer)
        self.format = TurnFormat(tokenizer, template_kwargs=template_kwargs, end_ids=end_ids)
        self.decode = lambda token_ids: cast(str, tokenizer.decode(list(token_ids)))
        self.rules = rules_of(config, self.decode, tokenizer.all_special_tokens)
        self.scorer = Scorer(self._build, masks_flagged=config.env.should_mask_flagged_samples)
        self.work = ActorWork[Ended | Rollout]()
        self._texts = asyncio.Lock()
        """Held by the one thread that may use the tokenizer."""

    async def start(self) -> None:
        """Starts the user's environments. Built-in ones start when the first row needs them."""
        env = self.config.env
        await self.scorer.start(
            list(dict.fromkeys((*env.own.functions, *({self.config.data.default.env_name} - {NEMO_GYM, *env.agents}))))
        )

    async def take(self, unjudged: Sequence[Unjudged]) -> tuple[Judged, Packed]:
        """Hands rollouts in and takes verdicts out; see `RewardActor.judge`."""
        if unjudged:
            self.work.begin(self._begin([(info, prompt) for info, prompt, verdict in unjudged if verdict is None]))
        for info, _, verdict in unjudged:
            if verdict is not None:
                self.work.begin(self._amend(info, verdict))
        answers = await self.work.take(ANSWER_S, gather_s=GATHER_S if self.max_turns == 1 else TURN_GATHER_S)
        transcripts = {name: answer for name, answer in answers.items() if isinstance(answer, Rollout)}
        ended = {name: answer for name, answer in answers.items() if not isinstance(answer, Rollout)}
        return (ended, list(transcripts), self.scorer.take_load()), pack(transcripts.values())

    async def _build(self, name: str) -> RewardPool:
        count = num_workers(name, self.config, num_cores=usable_cores())
        return await start_environment(name, self.config.env, num_workers=count, endpoints=self.endpoints)

    async def _in_texts(self, function: Callable[..., T], *arguments: object) -> T:
        async with self._texts:
            return await asyncio.to_thread(function, *arguments)

    async def _begin(self, unjudged: Sequence[tuple[RolloutInfo, Prompt]]) -> None:
        for first in range(0, len(unjudged), NUM_TOGETHER):
            together = unjudged[first : first + NUM_TOGETHER]
            tasks = await self._in_texts(self._make_tasks, together)
            for (info, prompt), (task, rollout, remarks) in sorted(
                zip(together, tasks, strict=True), key=lambda one: goes_last(one[1][0])
            ):
                self.work.begin(self._judge(info.request_id, prompt, task, rollout, remarks))

    def _make_tasks(
        self, unjudged: Sequence[tuple[RolloutInfo, Prompt]]
    ) -> list[tuple[Task, Rollout | None, Remarks | None]]:
        start = time.monotonic()
        tasks = []
        for (_, prompt), rollout in zip(
            unjudged, pull([info for info, _ in unjudged], timeout_s=self.config.deadlines.reward_s), strict=True
        ):
            parsers = parsers_of(self.config, prompt.env_name, prompt.row, prompt.template_kwargs)
            task = Task(self.format.texts(rollout), prompt.expected_answer, prompt.text, prompt.row, *parsers)
            remarks = inspect(rollout, self.decode, self.rules) if self.rules is not None else None
            tasks.append((task, rollout if self.max_turns > 1 else None, remarks))
        spans.add("make texts", start, rollouts=len(unjudged))
        return tasks

    async def _amend(self, info: RolloutInfo, verdict: Verdict) -> None:
        rules, limit_s = self.rules, self.config.deadlines.reward_s
        assert rules is not None, "the driver asks only if there are any"
        remarks = await self._in_texts(lambda: inspect_all(pull(info.sequences, timeout_s=limit_s), self.decode, rules))
        self.work.answer(info.request_id, (amend(verdict, remarks), "over"))

    async def _judge(
        self, request_id: str, prompt: Prompt, task: Task, rollout: Rollout | None, remarks: Remarks | None
    ) -> None:
        verdict = await self.scorer.judge(request_id, prompt.env_name, task)
        following: Rollout | Ending = "over"
        if rollout is not None:
            limits = partial(self.format.next_turn, max_turns=self.max_turns, max_model_len=self.max_model_len)
            next_turn = partial(limits, rollout, verdict, template_kwargs=prompt.template_kwargs)
            try:
                following = await self._in_texts(next_turn)
            except ValueError as error:  # the observation is the environment's
                logger.warning("%s is not scored: %s", rollout_name(request_id), error)
                verdict = replace(verdict, is_valid=False, status="error", reason=str(error))
        if isinstance(following, Rollout):
            self.work.answer(request_id, following)
        else:
            if rollout is not None and len(rollout.turns) > 1:
                verdict = replace(verdict, conversations=await self._in_texts(self.format.conversations, rollout))
            self.work.answer(request_id, (amend(verdict, remarks) if remarks is not None else verdict, following))


class RewardActor:
    """Carries rollouts to its `Judge`, in the event loop. Its calls come in threads of Ray's."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        self.judging = Judge(config, log_file.parent / FILE_NAME if num_gateways(config) else None)

    def ready(self) -> int:
        """Starts environments; this node's cores, once they are up. A user function that fails to import ends it."""
        wait_in_loop(self.judging.start(), start_deadline(self.judging.config).seconds)
        return usable_cores()

    def judge(self, rollouts: Sequence[Unjudged]) -> tuple[Judged, Packed]:
        """Begins to judge rollouts; returns verdicts since the last call, and transcripts of rollouts that continue.

        Waits up to `ANSWER_S` for the first verdict. A later call ends the wait of an earlier one. RuntimeError: an
        environment failed.
        """
        spans.begin("judge")
        answer = wait_in_loop(self.judging.take(rollouts), ANSWER_S + STUCK_S)
        spans.end("judge")
        return answer

    def look(self) -> None:
        """Returns after a while, as a sign of life."""
        time.sleep(LOOK_S)

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(judge, *arguments)`: tests look inside with it."""
        return function(self.judging, *arguments)


class Rewards(Service[RewardActor, Unjudged, Ended | PayloadRef, int]):
    """The driver's handle on reward actors. `book` carries them rollouts; a dead one is restarted and asked again."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks) -> None:
        self.config, self.placement = config, placement
        # A verdict takes as long as its environment allows; beyond that, a silent actor is not waited for.
        self.silence_s = config.deadlines.reward_s + longest_verdict_s(config)
        self.decides = config.max_rollout_turns > 1
        """True when rollouts may have several turns: then an actor decides after each one."""
        self.inspects = looks_for_faults(config)
        """True when actors look at the form of rollouts, also of those that agents have judged."""
        num_actors = len(placement.reward_options)
        self._seconds = [0.0] * num_actors
        self._load = RewardLoad()
        self._traces = Traces("is not scored, as its reward function raised")
        super().__init__(
            REWARDS,
            num_actors,
            tasks=tasks,
            log_folder=log_folder,
            deadline_s=config.deadlines.reward_s,
            start_s=start_deadline(config).seconds,
        )

    @property
    def num_undecided(self) -> int:
        """Turns without a decision yet on whether another one follows; 0 where rollouts have one turn."""
        return self.book.num_unfinished if self.decides else 0

    def waits(self) -> list[str]:
        """Sentences on environments with rollouts: `4 rollouts are with environment sums (my_rewards:sums)`."""
        return parts_at_work([prompt.env_name for _, prompt, _ in self.book.unanswered()], self.config.env)

    def wait_until_built(self) -> None:
        for number, num_nodes in Counter(self.wait_until_up().values()).items():
            logger.info(
                "Rewards, on each of their nodes (%d): %s", num_nodes, describe_workers(self.config, num_cores=number)
            )

    async def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Waits for enough verdicts, however many rollouts wait before them for a worker.

        Raises:
            DeadlineExceeded: no actor has begun or judged a rollout for `silence_s`.
            RuntimeError: an environment failed, or an actor keeps dying.
        """
        asked_at = warned_at = time.monotonic()

        def warn() -> None:
            nonlocal warned_at
            if self.book.num_unfinished and time.monotonic() > warned_at + self.deadline_s:
                warned_at = time.monotonic()
                logger.warning(
                    "A step has waited %.0f s for rewards, and %s have none; raise env.NAME.num_workers if cores "
                    "are left, use more nodes, or make the reward faster",
                    warned_at - asked_at, self._missing(),
                )  # fmt: skip

        try:
            await self.tasks.wait(
                is_enough,
                what=VERDICTS,
                who=lambda: [*self.waits(), *self.book.called()],
                limit_s=self.silence_s,
                look=warn,
            )
        except Silence:
            told = f"; {reason}" if (reason := hangs.explained(self.book.called())) else ""
            raise DeadlineExceeded(
                f"rewards: {self._missing()} have no verdict, and no worker has begun or ended one within "
                f"{rounded(self.silence_s)} s (deadlines.reward_s, and the longest env.NAME.timeout_s){told}"
            ) from None

    def _missing(self) -> str:
        return self.book.missing("; " + listed(self.waits()))

    def take_seconds(self) -> float:
        """Seconds of scoring since the last call, waited for or not: those of the busiest actor."""
        seconds, self._seconds = max(self._seconds), [0.0] * len(self._seconds)
        return seconds

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the workers' load since the last call."""
        load, self._load = self._load, RewardLoad()
        return {
            "rollout/reward_queue_max": float(load.longest_queue),
            "rollout/reward_wait_s": load.wait_s / max(1, load.num_judged),
            "rollout/reward_wait_max_s": load.longest_wait_s,
            "rollout/reward_restarts": float(self.book.num_restarts),
        }

    async def _carry(self, index: int, requests: list[Unjudged]) -> dict[str, Ended | PayloadRef]:
        await self.up(index)
        judged: Judged
        judged, transcripts = await self._answer(self.handles[index].judge, index, requests)
        ended, continued, load = judged
        self._seconds[index] += load.seconds
        self._load += load
        for name, (verdict, _) in ended.items():
            way_out = ". `python -m mrl.reward FUNCTION ROWS.jsonl` tries it in seconds"
            self._traces.log(name, verdict, self.log_file(index), way_out=way_out)
            self._traces.log_reason(name, verdict)
        if ended or continued or load.num_begun:
            self.tasks.tell(VERDICTS)
        return {**ended, **{name: PayloadRef(transcripts, place) for place, name in enumerate(continued)}}

    def _launch(self, index: int) -> tuple[ActorHandle[RewardActor], ray.ObjectRef[int]]:
        options = {**self.placement.reward_options[index], "max_concurrency": NUM_THREADS}
        actor = start_actor(RewardActor, options, self.config, self.log_file(index))
        return actor, ask(actor, RewardActor.ready)
