# SPDX-License-Identifier: Apache-2.0
"""The data that stages exchange: numpy arrays and Python values, no tensors, no handles of a library."""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Status = Literal["ok", "timeout", "crash", "error", "flagged"]
FlawKind = Literal["invalid_tool_call", "malformed_thinking"]
PENALTIES = ("duplicated_reasoning", "empty_final_answer", "unwanted_token", "malformed_think_tag")
"""Flags of a rollout whose form made its reward 0."""
NOT_FINITE = "not finite"
"""Words in the error of a step whose numbers are NaN or Inf, which all ranks raise."""
PromptKey = tuple[int, str]
"""(epoch, prompt id): a prompt in one pass over the data. Validation has an epoch of its own."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, rendered and tokenised."""

    prompt_id: str
    """Stable id of the row: `<file stem>:<line number>` unless the row names its own."""
    token_ids: tuple[int, ...]
    text: str
    """The question as the row gives it, before the chat template."""
    expected_answer: str
    """Empty if the environment judges by `row` alone."""
    env_name: str
    row: str = "{}"
    """The other fields of the row, for its environment: a JSON object, as text."""
    teacher: str = ""
    """Name of the teacher for this prompt; empty where there is none."""
    template_kwargs: str = ""
    """The row's own values for variables of the chat template, in later turns too: a JSON object, or empty."""
    teacher_token_ids: tuple[int, ...] = ()
    """The prompt that its teacher sees; empty: the same."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of an engine. `top_k` None keeps all tokens."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model: positions [start, stop) of `Rollout.token_ids`."""

    start: int
    stop: int
    weight_version: int


@dataclass(frozen=True)
class UntrainedTurn:
    """A turn of the model that its sequence does not train: positions [start, stop) from the prompt's first token."""

    start: int
    stop: int
    reason: str
    """A word; `elsewhere` where another sequence of the rollout trains it."""


@dataclass(frozen=True)
class Proposals:
    """Counts of a rollout's speculation: proposals, proposed tokens, and those that the model would have drawn."""

    num_rounds: int = 0
    num_tokens: int = 0
    num_accepted: int = 0

    def plus(self, other: Proposals) -> Proposals:
        return Proposals(
            self.num_rounds + other.num_rounds,
            self.num_tokens + other.num_tokens,
            self.num_accepted + other.num_accepted,
        )


@dataclass(frozen=True)
class PayloadRef:
    """Reference to an item that stays in the process that made it; `mrl.cluster.payload` pulls it."""

    reference: Hashable
    """Ray's reference to several items."""
    index: int


@dataclass(frozen=True)
class RolloutRequest:
    """Asks for one rollout, or a further turn of one. Two requests with equal fields give equal tokens."""

    prompt_id: str
    rollout_index: int
    epoch: int
    seed: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    earlier: Rollout | PayloadRef | None = None
    """The earlier turns, with the environment's tokens behind them, that a further turn continues; or, with finish
    reason `abort`, an unfinished rollout that goes on. A reference outside the engine's process.
    """

    @property
    def request_id(self) -> str:
        return f"{self.epoch}/{self.prompt_id}/{self.rollout_index}"

    @property
    def transcript(self) -> Rollout | None:
        """The earlier turns, in the engine's process."""
        assert not isinstance(self.earlier, PayloadRef), "a reference that was not resolved"
        return self.earlier

    @property
    def context_ids(self) -> list[int]:
        """The tokens that the model continues: the prompt, and the turns so far."""
        return [*self.token_ids, *(self.transcript.token_ids.tolist() if self.transcript else ())]


def hashed_seed(identity: str) -> int:
    """The first 8 bytes of sha256 over an identity, as an unsigned 63-bit integer."""
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") >> 1


def request_seed(run_seed: int, epoch: int, prompt_id: str, rollout_index: int) -> int:
    """Seed of one rollout, from its identity."""
    return hashed_seed(f"{run_seed}/{epoch}/{prompt_id}/{rollout_index}")


@dataclass(frozen=True)
class Rollout:
    """The result of one request. It stays in the process that sampled it; others see `RolloutInfo`."""

    request: RolloutRequest
    weight_version: int
    """Version of the engine when the request, or its last turn, began: no token is older. Later weights may have
    sampled later tokens.
    """
    token_ids: np.ndarray
    """int32 [L], the tokens after the prompt: those of the model, stop tokens included, and between its turns those of
    the environment.
    """
    generator_logprobs: np.ndarray
    """float32 [L], log-probability of each generated token in the distribution it was sampled from; 0 at the
    environment's tokens.
    """
    finish_reason: FinishReason
    routes: np.ndarray | None = None
    """The experts that the engine chose: uint8 (uint16 above 256 experts) [prompt + L - 1, layers with experts, experts
    per token].

    The last token was sampled, but never went through the model. None unless policy.router_replay.enabled.
    """
    earlier_turns: tuple[Turn, ...] = ()
    """All turns but the last, which begins at `last_turn_start`."""
    last_turn_start: int = 0
    num_weight_versions: int = 1
    """Versions of weights that sampled it: 1, unless it went on over a refit (in_flight_weight_updates, oversample)."""
    proposals: Proposals = Proposals()
    untrained: tuple[UntrainedTurn, ...] = ()
    tail_length: int = 0
    """Tokens of the environment behind the last turn, which another turn continues."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The model's turns, in order; all other tokens came from the environment."""
        stop = len(self.token_ids) - self.tail_length
        return (*self.earlier_turns, Turn(self.last_turn_start, stop, self.weight_version))

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.token_ids, self.generator_logprobs, self.routes)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True)
class RolloutInfo:
    """The driver's view of a rollout: metadata, and a reference with which a rank pulls the payload."""

    request_id: str
    prompt_id: str
    rollout_index: int
    weight_version: int
    """Version of the oldest weights that sampled one of its tokens."""
    prompt_length: int
    length: int
    """Number of tokens after the prompt."""
    finish_reason: FinishReason
    payload: Rollout | PayloadRef | None
    """Reference to the `Rollout`; on a policy rank and in files the `Rollout` itself."""
    num_observed: int = 0
    """Tokens of `length` that came from the environment."""
    num_turns: int = 1
    last_turn_start: int = 0
    """Start of the last turn."""
    num_weight_versions: int = 1
    proposals: Proposals = Proposals()
    epoch: int = 0
    further: tuple[RolloutInfo, ...] = ()
    """Other sequences of an agent's rollout: of sub-agents, retries, compacted conversations; with its advantage."""
    place: int = 0
    """Place in `sequences`; above 0 for one of these."""
    common: tuple[int, ...] = ()
    """An agent's: the number of tokens with which it begins as each sequence of the rollout before it does."""
    prompt_checksum: int = 0
    """An agent's: crc32 of its prompt, which the agent writes; 0 where rollouts of a group have the same prompt."""
    untrained: tuple[UntrainedTurn, ...] = ()

    @property
    def is_further(self) -> bool:
        return self.place > 0

    @property
    def sequences(self) -> tuple[RolloutInfo, ...]:
        """All sequences of the rollout."""
        return (self, *self.further)

    @property
    def key(self) -> PromptKey:
        """Key of its group."""
        return self.epoch, self.prompt_id

    @property
    def num_generated(self) -> int:
        """Tokens of `length` that the model generated."""
        return self.length - self.num_observed

    @property
    def num_trained(self) -> int:
        """Tokens that the model generated in all sequences."""
        return sum(sequence.num_generated for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return self.prompt_length + self.length

    @property
    def pulled(self) -> Rollout:
        """The payload, in a process that has pulled it."""
        assert isinstance(self.payload, Rollout), "a reference that was not resolved"
        return self.payload

    def with_payloads(self, payloads: Sequence[Rollout | PayloadRef]) -> RolloutInfo:
        """The rollout with a payload for each of its sequences."""
        further = [replace(one, payload=payload) for one, payload in zip(self.further, payloads[1:], strict=True)]
        return replace(self, payload=payloads[0], further=tuple(further))

    @classmethod
    def of(cls, rollout: Rollout, payload: Rollout | PayloadRef | None = None) -> RolloutInfo:
        """Summary of a rollout for the driver; without `payload`, the receiver fills in the reference."""
        request = rollout.request
        return cls(
            request_id=request.request_id,
            epoch=request.epoch,
            prompt_id=request.prompt_id,
            rollout_index=request.rollout_index,
            weight_version=min(turn.weight_version for turn in rollout.turns),
            prompt_length=len(request.token_ids),
            length=len(rollout.token_ids),
            finish_reason=rollout.finish_reason,
            payload=payload,
            num_observed=len(rollout.token_ids) - sum(turn.stop - turn.start for turn in rollout.turns),
            num_turns=len(rollout.turns),
            last_turn_start=rollout.last_turn_start,
            num_weight_versions=rollout.num_weight_versions,
            proposals=rollout.proposals,
            untrained=rollout.untrained,
        )


@dataclass(frozen=True)
class Flaw:
    """Generated tokens of a rollout with a fault, whatever its reward."""

    kind: FlawKind
    start: int
    """Index of the first of these tokens in `Rollout.token_ids`."""
    stop: int
    sequence: int = 0
    """Place of the sequence in `RolloutInfo.sequences`."""


LARGEST_REWARD = 3e38  # advantages are float32


@dataclass(frozen=True)
class Verdict:
    """An environment's judgement of a rollout. `is_valid` False masks the rollout from the loss (never a silent 0)."""

    reward: float
    is_valid: bool
    status: Status
    extracted: str
    text: str
    """The decoded rollout, for samples in the report."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, by name; empty if the environment gives one number."""
    flags: tuple[str, ...] = ()
    """Events to count besides the reward, `invalid_tool_call` for example."""
    flaws: tuple[Flaw, ...] = ()
    observation: tuple[Mapping[str, str], ...] = ()
    """Messages with which the environment answers, if turns are left."""
    reason: str = ""
    """Reason why the rollout is not valid, or how its text made its grader fail."""
    trace: str = ""
    """Traceback of the user's function that has raised."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name, which are no part of the reward."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Further texts of its line in the table of samples, by name."""
    conversations: tuple[tuple[Mapping[str, str], ...], ...] = ()
    """Messages (`role`, `content`) of a rollout of several turns or of an agent, for readers, long ones cut; an agent
    may have several conversations.
    """

    @property
    def has_reward(self) -> bool:
        """True if `reward` counts in the baseline of its group: that of a flagged rollout does, although masked."""
        return self.is_valid or self.status == "flagged"

    @property
    def trace_kind(self) -> str:
        """Equal for verdicts that fail alike, whatever their messages: error type and place in the trace, or reason."""
        place = re.match(r'Traceback:\n(?:  .*\n)*  (File "[^<].*", line \d+)', self.trace)
        return f"{self.reason.partition(':')[0]} {place[1]}" if place else self.reason or self.status

    def adjusted(self, factor: float, added: float = 0.0) -> Verdict:
        """The verdict with `factor * reward + added` as reward. Components change alike, by an equal share of `added`.

        All that changes a reward goes through here, so that components still add up to it: GDPO looks at these alone.
        """
        parts = {name: factor * value + added / len(self.components) for name, value in self.components.items()}
        return replace(self, reward=factor * self.reward + added + 0.0, components=parts)


@dataclass
class RolloutGroup:
    """The rollouts of one prompt and their verdicts so far, both in order of `rollout_index`; whole, it has all."""

    prompt: Prompt
    rollouts: tuple[RolloutInfo, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    epoch: int = 0
    num_generations: int = 0
    """Rollouts that were asked for."""
    weight_version: int = 0
    """Version of the engines when the group was asked for."""
    is_kept: bool = False
    """True if an earlier attempt has sampled its rollouts."""
    num_kept_tokens: int = 0
    """Generated tokens of its rollouts that an earlier attempt has sampled."""
    begun: tuple[RolloutInfo, ...] = ()
    """Rollouts without a verdict that an earlier attempt has sampled; those with finish reason `abort` go on."""
    judged: list[int] = field(init=False, repr=False, compare=False)
    """Indices of the rollouts with a verdict, in order."""

    def __post_init__(self) -> None:
        self.judged = [one.rollout_index for one in self.rollouts[: len(self.verdicts)]]

    @property
    def key(self) -> PromptKey:
        return self.epoch, self.prompt.prompt_id

    @property
    def num_missing(self) -> int:
        """Rollouts that are not sampled."""
        return self.num_generations - len(self.rollouts)

    @property
    def num_unjudged(self) -> int:
        return self.num_generations - len(self.verdicts)

    def note_sampled(self, rollout: RolloutInfo) -> None:
        """Adds a rollout in its place."""
        self.rollouts = tuple(sorted((*self.rollouts, rollout), key=lambda one: one.rollout_index))

    def note_judged(self, index: int, verdict: Verdict) -> None:
        """Adds the verdict on the rollout of this index in its place."""
        place = bisect.bisect(self.judged, index)
        self.judged.insert(place, index)
        self.verdicts = (*self.verdicts[:place], verdict, *self.verdicts[place:])

    @property
    def rewards(self) -> list[float]:
        return [verdict.reward for verdict in self.verdicts]

    @property
    def oldest_version(self) -> int:
        """Weight version of its oldest token."""
        return min(rollout.weight_version for rollout in (*self.rollouts, *self.begun))


@dataclass(frozen=True)
class FixedAdvantage:
    """The advantage of a span of generated tokens, instead of the rollout's."""

    start: int
    stop: int
    advantage: float


@dataclass(frozen=True)
class TeacherTokens:
    """Teacher outputs of a rollout at each of the N generated tokens: of its K likeliest tokens, or of the one there.
    They stay with the rank that computed them; others see a reference.
    """

    scores: np.ndarray
    """float32 [N, K]: logits, the largest first; or, with K = 1, the logprob of the token that the policy generated."""
    token_ids: np.ndarray
    """int32 [N, K], the tokens of the scores."""


@dataclass(frozen=True)
class TrainSequence:
    """A rollout with the values that its loss needs."""

    rollout: RolloutInfo
    advantage: float
    is_valid: bool
    """True when its tokens count in the loss."""
    reward: float = 0.0
    fixed_advantages: tuple[FixedAdvantage, ...] = ()
    """Token advantages that replace its own; the later one counts where they overlap."""
    teacher: TeacherTokens | PayloadRef | None = None
    """Reference to the outputs of the rollout's teacher, if any; on a policy rank and in files these themselves."""


@dataclass(frozen=True)
class TokenSample:
    """The beginning of a trained sequence token by token, for readers. Lists of one length, the prompt included."""

    token_ids: list[int]
    is_generated: list[int]
    generator_logprobs: list[float]
    old_logprobs: list[float] | None
    """None where the loss does without them."""
    advantages: list[float]
    loss_mask: list[int]
    entropies: list[float]
    """In nats, of the distributions that the policy had before the update."""


TokenSamples = Mapping[str, Sequence[tuple[RolloutInfo, TokenSample]]]
"""Sequences of some rollouts, by request id; the first sequence of a rollout first."""


@dataclass(frozen=True)
class Batch:
    """A global batch: its sequences, and the row of the data-parallel rank where each is trained."""

    sequences: tuple[TrainSequence, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """rows[dp_rank][row_index] = indices into `sequences`, in training. Every dp rank has the same number of rows; a
    row may be empty.
    """
    logprob_rows: tuple[tuple[tuple[int, ...], ...], ...]
    """The same for logprob passes: every dp rank has the same sequences, in other rows if those have another number of
    tokens.
    """
    num_valid_tokens: int
    """Generated tokens of valid sequences over the whole batch: the denominator of a token-level loss."""
    num_valid_sequences: int
    metrics: dict[str, float]
    """Metrics of the rows' fill and the ranks' balance: `train/*`."""

    @property
    def shares_prefixes(self) -> bool:
        """True if rows have the beginnings that their sequences have in common once. Records of old steps say it so."""
        return "train/prefix_sharing" in self.metrics


@dataclass
class RunState:
    """Progress of a run. Every checkpoint has it as JSON."""

    step: int = 0
    weight_version: int = 0
    """Version of the weights in the engines: refits since the process started."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last finished step, so that checkpoints can be ranked."""
