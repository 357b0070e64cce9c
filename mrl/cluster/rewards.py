# SPDX-License-Identifier: Apache-2.0
"""Environments in actors of their own, one on each node: they make and judge texts near the payload, and the driver sees verdicts.

If rollouts may have several turns, an actor also decides after each turn whether another one follows, and makes its transcript. No actor
knows of the others, and a verdict follows from the rollout alone: the driver gives each rollout to the actor with the fewest unfinished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray

from mrl import spans
from mrl.cluster import hangs
from mrl.cluster.book import RequestBook
from mrl.cluster.calls import Actors, answered, ask, start_actor
from mrl.cluster.environment import start_actor_process
from mrl.cluster.errors import ActorLost, DeadlineExceeded
from mrl.cluster.event_loop import News, Silence, in_loop
from mrl.cluster.payload import Packed, PayloadRef, pack, pull
from mrl.cluster.runtime import Placement
from mrl.config.rules.data import NEMO_GYM
from mrl.config.schema.run import RunConfig
from mrl.data.turns import Ending, TurnFormat
from mrl.envs.endpoints import FILE_NAME
from mrl.envs.inspection import Remarks, amend, inspect, rules_of
from mrl.envs.parsers import parsers_of
from mrl.envs.pool import RewardPool
from mrl.envs.scorer import Answer, Load, Scorer, start_environment
from mrl.envs.task import Task
from mrl.envs.workers import describe_workers, longest_verdict_s, num_workers, usable_cores
from mrl.plan.deadlines import start_deadline
from mrl.types import Prompt, Rollout, RolloutInfo, Transcript, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
T = TypeVar("T")

REWARDS = "reward actor"
VERDICTS = "rewards"
"""Name of the driver's wait for verdicts."""
# An actor that has no verdict answers so often, as a sign of life.
ANSWER_S = 1.0
# Verdicts that come within so long of the first are answered together: a step needs all of them, a rollout of several turns its own.
GATHER_S, TURN_GATHER_S = 0.1, 0.02
# Texts are made of so many rollouts at once; children begin the first ones meanwhile.
NUM_TOGETHER = 32
# Calls of an actor at once: one hands rollouts in, another waits for verdicts, and tests look inside.
NUM_CALLS = 4
# A reward actor that dies this often without a single verdict in between will not get better.
MAX_FRUITLESS_RESTARTS = 3


@dataclass(frozen=True)
class Unjudged:
    """A rollout that waits for its verdict."""

    info: RolloutInfo
    prompt: Prompt

    @property
    def request_id(self) -> str:
        return self.info.request_id


@dataclass(frozen=True)
class Judged:
    """Verdicts of a reward actor since its last answer."""

    ended: Mapping[str, tuple[Verdict, Ending]]
    """Verdicts on rollouts that have ended, and why they have, by request id."""
    continued: Sequence[str]
    """Rollouts that go on; their packed transcripts come beside, in the same order."""
    load: Load


Judgement = tuple[Verdict, Ending] | PayloadRef
"""The verdict on a rollout that has ended, and why it has; or the transcript that its next turn continues."""


class RewardActor:
    """Decodes rollouts and asks their environment for a verdict. Its calls come in threads of Ray's; environments live in the scorer's."""

    def __init__(self, config: RunConfig, log_file: Path) -> None:
        start_actor_process(log_file)
        from mrl.data.chat import load_tokenizer, use_chat_template
        from mrl.data.prompts import end_token_ids

        self.config = config
        self.max_turns = config.max_rollout_turns
        self.max_model_len = config.policy.generation.vllm_cfg.max_model_len
        self.tokenizer = load_tokenizer(config.policy.tokenizer.name)
        use_chat_template(self.tokenizer, config.policy.tokenizer)
        template_kwargs, end_ids = config.policy.tokenizer.chat_template_kwargs, end_token_ids(config.policy, self.tokenizer)
        self.format = TurnFormat(self.tokenizer, template_kwargs=template_kwargs, end_ids=end_ids)
        self.rules = rules_of(config, self.decode, self.tokenizer.all_special_tokens)
        self._remarks: dict[str, Remarks] = {}
        self.undecided: dict[str, Rollout] = {}
        # One thread at a time uses the tokenizer, and the two tables.
        self._lock = threading.Lock()
        self.scorer = Scorer(self._build, masks_flagged=config.env.should_mask_flagged_samples)
        has_servers = config.policy.generation.vllm_cfg.expose_http_server
        self.endpoints = log_file.parent / FILE_NAME if has_servers else None

    def ready(self) -> int:
        """Starts the environments; the cores of this node, once they are up. A user's function that cannot be imported ends it."""
        config = self.config
        # Environments that users name start now; those that come with mrl start when the first row needs them.
        names = dict.fromkeys((*config.env.own.functions, *({config.data.default.env_name} - {NEMO_GYM, *config.env.agents})))
        self.scorer.start(list(names), timeout_s=start_deadline(config).seconds)
        return usable_cores()

    def _build(self, name: str) -> Awaitable[RewardPool]:
        # No coroutine itself: Ray would run all methods of this class in an event loop of its own, beside which no signal is handled.
        count = num_workers(name, self.config, num_cores=usable_cores())
        return start_environment(name, self.config.env, num_workers=count, endpoints=self.endpoints)

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids)))

    def judge(self, rollouts: Sequence[Unjudged]) -> tuple[Judged, Packed]:
        """Hands rollouts to their environments; then what was judged since the last answer, and the transcripts of rollouts that go on.

        Waits up to `ANSWER_S` for the first verdict. A later call ends the wait of an earlier one.
        """
        spans.begin("judge")
        for first in range(0, len(rollouts), NUM_TOGETHER):
            self._submit(rollouts[first : first + NUM_TOGETHER])
        verdicts, load = self.scorer.take(ANSWER_S, gather_s=GATHER_S if self.max_turns == 1 else TURN_GATHER_S)
        with self._lock:
            answer = self._decide(verdicts, load)
        spans.end("judge")
        return answer

    def _decide(self, verdicts: Mapping[str, Verdict], load: Load) -> tuple[Judged, Packed]:
        ended, continued, transcripts = dict[str, tuple[Verdict, Ending]](), list[str](), list[Transcript]()
        for request_id, verdict in verdicts.items():
            remarks = self._remarks.pop(request_id, None)
            following: Transcript | Ending = "over"
            if self.max_turns > 1:
                rollout = self.undecided.pop(request_id)
                try:
                    following = self.format.next_turn(rollout, verdict, max_turns=self.max_turns, max_model_len=self.max_model_len)
                except ValueError as error:  # the observation is the environment's
                    logger.warning("Rollout %s is not scored: %s", request_id, error)
                    verdict = replace(verdict, is_valid=False, status="error", reason=str(error))
            if isinstance(following, Transcript):
                continued.append(request_id)
                transcripts.append(following)
            else:
                ended[request_id] = (amend(verdict, remarks) if remarks is not None else verdict, following)
        return Judged(ended, continued, load), pack(transcripts)

    def _submit(self, unjudged: Sequence[Unjudged]) -> None:
        start = time.monotonic()
        rollouts = pull([item.info for item in unjudged], timeout_s=self.config.deadlines.reward_s)
        answers = []
        with self._lock:
            for item, rollout in zip(unjudged, rollouts, strict=True):
                if self.rules is not None:
                    self._remarks[item.request_id] = inspect(rollout, self.decode, self.rules)
                if self.max_turns > 1:
                    self.undecided[item.request_id] = rollout
                prompt = item.prompt
                parsers = parsers_of(self.config, prompt.env_name, prompt.row)
                task = Task(self.format.texts(rollout), prompt.expected_answer, prompt.text, prompt.row, *parsers)
                answers.append(Answer(item.request_id, prompt.env_name, task))
            spans.add("make texts", start, rollouts=len(unjudged))
        self.scorer.submit(answers)

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        return function(self, *arguments)


class Rewards(Actors[RewardActor]):
    """The driver's handle on the reward actors. `book` carries rollouts to them; one that dies is started again, and asked again."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path, news: News | None = None) -> None:
        super().__init__(REWARDS, deadline_s=config.deadlines.reward_s)
        self.config = config
        self.placement = placement
        self.log_folder = log_folder
        self.start_s = start_deadline(config).seconds
        # A verdict takes as long as its environment allows; beyond that, a silent actor is not waited for.
        self.silence_s = config.deadlines.reward_s + longest_verdict_s(config)
        self.decides = config.max_rollout_turns > 1
        """True when rollouts may have several turns: then an actor decides after each one."""
        num_actors = len(placement.first_slots)
        self.news = news or News()
        # A second call hands rollouts in while the first waits for verdicts.
        limits = {"max_fruitless_restarts": MAX_FRUITLESS_RESTARTS, "num_calls": 2}
        self.book = RequestBook[Unjudged, Judgement](REWARDS, num_actors, self._judge, self._restart, news=self.news, **limits)
        self._starting: dict[int, ray.ObjectRef[int]] = {}
        self._seconds = [0.0] * num_actors
        self._load = Load()
        self.handles = [self._start(index) for index in range(num_actors)]
        for index in range(num_actors):
            in_loop(self.book.begin, index)

    @property
    def num_undecided(self) -> int:
        """Turns without a decision yet on whether another one follows; 0 where rollouts have one turn."""
        return self.book.num_unfinished if self.decides else 0

    def wait_until_built(self) -> None:
        starting, self._starting = self._starting, {}
        num_cores = self.wait({self.name(index): ready for index, ready in starting.items()}, deadline_s=self.start_s, what="start")
        for number, num_nodes in Counter(num_cores.values()).items():
            logger.info("Rewards, on %d nodes: %s", num_nodes, describe_workers(self.config, num_cores=number))

    def asked(self) -> list[str]:
        """Names of the actors that have not answered."""
        return [str(self.name(index)) for index in self.book.called()]

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Waits for verdicts until there are enough, however many rollouts wait before them for a worker.

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
                    "A step has waited %.0f s for rewards, and %s have none; raise env.NAME.num_workers if cores are left, use more "
                    "nodes, or make the reward faster",
                    warned_at - asked_at, self.book.missing(),
                )  # fmt: skip

        try:
            self.news.wait(is_enough, what=VERDICTS, who=self.asked, limit_s=self.silence_s, on_tick=warn)
        except Silence:
            told = f"; {reason}" if (reason := hangs.explained(self.asked())) else ""
            raise DeadlineExceeded(
                f"rewards: {self.book.missing()} have no verdict, and no worker has begun or ended one within {self.silence_s:g} s "
                f"(deadlines.reward_s, and the longest env.NAME.timeout_s){told}"
            ) from None

    def take_seconds(self) -> float:
        """Seconds of scoring since the last call, waited for or not: those of the busiest actor."""

        def take() -> float:
            seconds, self._seconds = max(self._seconds), [0.0] * len(self._seconds)
            return seconds

        return in_loop(take)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the workers' load since the last call."""

        def take() -> Load:
            load, self._load = self._load, Load()
            return load

        load = in_loop(take)
        return {
            "rollout/reward_queue_max": float(load.longest_queue),
            "rollout/reward_wait_s": load.wait_s / max(1, load.num_judged),
            "rollout/reward_wait_max_s": load.longest_wait_s,
            "rollout/reward_restarts": float(self.book.num_restarts),
        }

    async def _judge(self, index: int, rollouts: list[Unjudged]) -> dict[str, Judgement]:
        if index in self._starting:
            await answered(self._starting.pop(index), actor=self.name(index), what="start")
        answer = self.handles[index].judge.options(num_returns=2).remote(rollouts)
        reference, transcripts = cast("tuple[ray.ObjectRef[Judged], ray.ObjectRef]", answer)
        judged = await answered(reference, actor=self.name(index), what="rewards")
        self._seconds[index] += judged.load.seconds
        self._load += judged.load
        if judged.ended or judged.continued or judged.load.num_begun:
            self.news.tell(VERDICTS)
        return {**judged.ended, **{name: PayloadRef(transcripts, place) for place, name in enumerate(judged.continued)}}

    def _restart(self, index: int, lost: ActorLost) -> None:
        num_unjudged = self.book.end(index, self._log_file(index))
        logger.warning("%s; starting it again (%d rollouts will be judged again)", lost, num_unjudged)
        ray.kill(self.handles[index])
        self.handles[index] = self._start(index)
        self.news.tell(VERDICTS, time.monotonic() + self.start_s)
        self.book.begin(index)

    def _start(self, index: int) -> ActorHandle[RewardActor]:
        options = {**self.placement.options(self.placement.first_slots[index], {}), "max_concurrency": NUM_CALLS}
        actor = start_actor(RewardActor, options, self.config, self._log_file(index))
        self._starting[index] = ask(actor, RewardActor.ready)
        return actor

    def _log_file(self, index: int) -> Path:
        return self.log_folder / ("rewards.log" if index == 0 else f"rewards-{index}.log")
