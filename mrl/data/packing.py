# SPDX-License-Identifier: Apache-2.0
"""Packed rows: several sequences side by side in one row of tokens, with cumulative lengths (THD).

T tokens of a row, L layers with experts (in the order of the model), K experts per token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mrl.types import Rollout, TeacherTokens, TokenSample, TrainSequence

MAX_SAMPLED_TOKENS = 4096
"""Limit for a sequence that is kept for readers, so that a step's texts stay small."""


@dataclass(frozen=True)
class PackedTeacher:
    """Teacher outputs for one row's tokens, at the positions that predict them; 0 where the label was not generated."""

    scores_TK: torch.Tensor
    token_ids_TK: torch.Tensor


@dataclass(frozen=True)
class PackedRoutes:
    """The routes of one row: the experts to which the engine sent each token."""

    expert_ids_TLK: torch.Tensor
    """uint8 as the engine gave them, int16 above 256 experts. 0 where no route is known."""
    is_known_T: torch.Tensor
    """bool, False at tokens that the engine never saw: the last one of each sequence, and padding. The router chooses
    for them.
    """


@dataclass(frozen=True)
class PrefixTree:
    """The U tokens of a row without repetition, level by level.

    A node is a run of tokens that all its sequences have after its parent's; a path, the tokens of a node and of all
    nodes above it.
    """

    positions_U: torch.Tensor
    """int64, position in the row of each token, in the first of its sequences; 0 for padding."""
    tokens_T: torch.Tensor
    """int64, the tree's token at each position of the row; 0 for padding."""
    lengths: tuple[int, ...]
    """Tokens of each node, level by level; padding is the last node, a level of its own."""
    parents: tuple[int, ...]
    """Node above each node; -1 without one."""
    counts: tuple[int, ...]
    """Sequences that have each node; 0 for padding."""
    levels: tuple[range, ...]
    """Nodes of each level. Parents are in earlier levels; nodes of a level have all a parent, or none has."""

    @property
    def counts_U(self) -> torch.Tensor:
        """Number of tokens of the row that each stands for, int64."""
        return torch.tensor(self.counts).repeat_interleave(torch.tensor(self.lengths))

    @property
    def starts(self) -> list[int]:
        """The first token of each node, and at last U."""
        return [0, *np.cumsum(self.lengths).tolist()]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one, or none for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> torch.Tensor:
        """The tokens of a path, int64, those of the node included; empty for -1."""
        starts, nodes = self.starts, self.path(node)
        return torch.cat([torch.arange(0), *[torch.arange(starts[index], starts[index + 1]) for index in nodes]])


@dataclass
class PackedRow:
    """A row for model and loss. Position t predicts token t+1 of a sequence: label, masks, logprob, advantage are at t.

    Tensors of tokens are int64, masks and values float32. Values are 0 where the label was not generated.
    """

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    """From 0 in every sequence."""
    labels_T: torch.Tensor
    """Token t+1; 0 where there is none."""
    loss_mask_T: torch.Tensor
    """1 where the label is a generated token of a valid sequence."""
    generated_mask_T: torch.Tensor
    """1 where the label is a generated token, valid or not."""
    generator_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    """Advantage of the label's sequence; 0 where that is not valid."""
    fixed_advantages_T: torch.Tensor
    """The advantages of tokens that do not have that of their sequence; NaN at all others."""
    cu_seqlens: torch.Tensor
    """int32 [num_sequences + 1], from 0 to T: each sequence with the padding behind it. Padding at the end is a
    sequence of its own.
    """
    max_seqlen: int
    sequence_indices: list[int]
    """Indices into `Batch.sequences`, without the padding; `lengths` and `rewards` are those of the same sequences,
    without padding.
    """
    lengths: list[int]
    rewards: list[float]
    rollouts: list[int] | None = None
    """Index of the first sequence of the rollout of each of these sequences; None: each is a rollout."""
    rollout_tokens_S: torch.Tensor | None = None
    """float32 [num_sequences], by `cu_seqlens`: tokens that count of each one's rollout, in the whole batch. Set by
    `mrl.policy.batch.global_batch_size`."""
    routes: PackedRoutes | None = None
    """The engine's choices of experts; None without router replay."""
    tree: PrefixTree | None = None
    """The tokens that the model computes in place of the row's; None: the row's. Set by the policy's rank."""
    teacher: PackedTeacher | None = None
    old_logprobs_T: torch.Tensor | None = None
    """Set by passes of the step, as the values below, on the device of the last pipeline stage alone."""
    reference_logprobs_T: torch.Tensor | None = None
    values_T: torch.Tensor | None = None
    """The critic's, before its updates."""
    returns_T: torch.Tensor | None = None
    """Targets of the critic; NaN at tokens that do not count."""
    entropy_T: torch.Tensor | None = None
    """Entropy of the policy before the updates, for readers; a train step of the policy loss leaves it here."""

    @property
    def sequence_rewards(self) -> torch.Tensor:
        """Rewards by `cu_seqlens`, float32 [num_sequences]; 0 for padding."""
        num_padding = len(self.cu_seqlens) - 1 - len(self.rewards)
        return torch.tensor([*self.rewards, *[0.0] * num_padding])

    @property
    def positive_mask_T(self) -> torch.Tensor:
        """float32, 1 where the loss mask is and the sequence has a reward above 0."""
        is_positive_T = (self.sequence_rewards > 0).repeat_interleave(self.cu_seqlens.diff())
        return self.loss_mask_T * is_positive_T

    def masked(self, is_kept: torch.Tensor) -> PackedRow:
        """The row with only the kept sequences in its loss; `is_kept` is bool [num_sequences], by `cu_seqlens`."""
        return replace(self, loss_mask_T=self.loss_mask_T * is_kept.repeat_interleave(self.cu_seqlens.diff()))

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that count in the loss."""
        return int(self.loss_mask_T.sum())

    @property
    def valid_tokens_S(self) -> torch.Tensor:
        """Tokens that count in the loss of each sequence, float32 [num_sequences], by `cu_seqlens`."""
        return torch.stack([part.sum() for part in self.loss_mask_T.split(self.cu_seqlens.diff().tolist())])

    @property
    def num_valid_sequences(self) -> int:
        """Sequences with at least one token that counts in the loss."""
        return int((self.valid_tokens_S > 0).sum())


def with_prompt(rollout: Rollout, token_ids: tuple[int, ...]) -> Rollout:
    """The rollout behind another prompt, without the experts that an engine chose behind its own."""
    return replace(rollout, request=replace(rollout.request, token_ids=token_ids), routes=None)


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def pack_row(
    sequences: Mapping[int, TrainSequence], *, divisible_by: int, sequence_multiple: int = 1, pad_token_id: int
) -> PackedRow:
    """Packs sequences, with pulled payloads, by index into `Batch.sequences`, into one row; without any, all padding.

    Every sequence is padded at its end to a multiple of `sequence_multiple` tokens, and the row to a multiple of
    `divisible_by`, itself a multiple of the other.
    """
    assert divisible_by % sequence_multiple == 0
    rollouts = [sequence.rollout.pulled for sequence in sequences.values()]
    lengths = [len(rollout.request.token_ids) + len(rollout.token_ids) for rollout in rollouts]
    padded = [padded_length(length, sequence_multiple) for length in lengths]
    num_tokens = padded_length(max(1, sum(padded)), divisible_by)
    padding = [num_tokens - sum(padded)] if num_tokens > sum(padded) else []
    bounds = np.cumsum([0, *padded, *padding])

    token_ids = np.full(num_tokens, pad_token_id, dtype=np.int64)
    labels = np.zeros(num_tokens, dtype=np.int64)
    loss_mask, generated_mask, generator_logprobs, advantages = np.zeros((4, num_tokens), dtype=np.float32)
    fixed_advantages = np.full(num_tokens, np.nan, dtype=np.float32)
    for sequence, rollout, start, length in zip(sequences.values(), rollouts, bounds[:-1], lengths, strict=False):
        prompt_length, stop = len(rollout.request.token_ids), start + length
        token_ids[start : start + prompt_length] = rollout.request.token_ids
        token_ids[start + prompt_length : stop] = rollout.token_ids
        labels[start : stop - 1] = token_ids[start + 1 : stop]
        # The first generated token is predicted at the last token of the prompt.
        shift = start + prompt_length - 1
        for turn in rollout.turns:
            generated = slice(shift + turn.start, shift + turn.stop)
            generated_mask[generated] = 1.0
            generator_logprobs[generated] = rollout.generator_logprobs[turn.start : turn.stop]
            if sequence.is_valid:
                loss_mask[generated] = 1.0
                advantages[generated] = sequence.advantage
        for span in sequence.fixed_advantages:
            fixed_advantages[shift + span.start : shift + span.stop] = span.advantage

    sizes = np.diff(bounds)
    return PackedRow(
        token_ids_T=torch.from_numpy(token_ids),
        position_ids_T=torch.from_numpy(np.arange(num_tokens, dtype=np.int64) - np.repeat(bounds[:-1], sizes)),
        labels_T=torch.from_numpy(labels),
        loss_mask_T=torch.from_numpy(loss_mask),
        generated_mask_T=torch.from_numpy(generated_mask),
        generator_logprobs_T=torch.from_numpy(generator_logprobs),
        advantages_T=torch.from_numpy(advantages),
        fixed_advantages_T=torch.from_numpy(fixed_advantages),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(sizes.max()),
        sequence_indices=list(sequences),
        lengths=lengths,
        rewards=[sequence.reward for sequence in sequences.values()],
        rollouts=[index - sequence.rollout.place for index, sequence in sequences.items()],
        routes=pack_routes([rollout.routes for rollout in rollouts], bounds[: len(sequences)].tolist(), num_tokens),
        teacher=pack_teacher([sequence.teacher for sequence in sequences.values()], generated_mask > 0),
    )


def pack_teacher(sequences: Sequence[object | None], is_generated_T: np.ndarray) -> PackedTeacher | None:
    """Joins the teacher outputs of a row's sequences, in order; None if no sequence has any."""
    found = [sequence for sequence in sequences if isinstance(sequence, TeacherTokens)]
    if not found:
        return None
    assert len(found) == len(sequences), "a teacher that knows some of the sequences only"
    scores = np.zeros((len(is_generated_T), found[0].scores.shape[1]), dtype=np.float32)
    token_ids = np.zeros(scores.shape, dtype=np.int64)
    scores[is_generated_T] = np.concatenate([sequence.scores for sequence in found])
    token_ids[is_generated_T] = np.concatenate([sequence.token_ids for sequence in found])
    return PackedTeacher(torch.from_numpy(scores), torch.from_numpy(token_ids))


def split_teacher(row: PackedRow, scores_TK: torch.Tensor, token_ids_TK: torch.Tensor) -> dict[int, TeacherTokens]:
    """Splits the teacher outputs of all positions by sequence, by index into the batch; see `PackedRow`."""
    bounds, found = row.cu_seqlens.tolist(), {}
    for index, start, stop in zip(row.sequence_indices, bounds, bounds[1:], strict=False):
        is_generated = row.generated_mask_T[start:stop] > 0
        scores, token_ids = (values[start:stop].cpu()[is_generated] for values in (scores_TK, token_ids_TK))
        found[index] = TeacherTokens(scores.numpy(), token_ids.to(torch.int32).numpy())
    return found


def pack_routes(sequences: Sequence[np.ndarray | None], starts: Sequence[int], num_tokens: int) -> PackedRoutes | None:
    """The routes of a row of `num_tokens`, from `Rollout.routes` of the sequences at `starts`; None if none has any."""
    routes = [array for array in sequences if array is not None]
    # Where an agent has sampled nothing, no token has one.
    shapes = {array.shape[1:] for array in routes if len(array)}
    if not shapes:
        return None
    if len(routes) < len(sequences) or len(shapes) > 1:
        raise ValueError(
            f"{len(routes)} of {len(sequences)} rollouts of a packed row have routes, of shapes {sorted(shapes)} "
            "per token"
        )
    # Rows and slices of them are indexed, which torch does not do with uint16.
    dtype = np.uint8 if all(array.dtype == np.uint8 for array in routes) else np.int16
    expert_ids = np.zeros((num_tokens, *shapes.pop()), dtype=dtype)
    is_known = np.zeros(num_tokens, dtype=np.bool_)
    for array, start in zip(routes, starts, strict=True):
        if not len(array):
            continue
        expert_ids[start : start + len(array)] = array
        is_known[start : start + len(array)] = True
    return PackedRoutes(torch.from_numpy(expert_ids), torch.from_numpy(is_known))


def regroup(values_T: list[torch.Tensor], rows: list[PackedRow], other_rows: list[PackedRow]) -> list[torch.Tensor]:
    """Values for the tokens of `other_rows`, from those of `rows`, which have the same sequences; 0 at padding."""
    if rows is other_rows:
        return values_T
    found = {
        index: part
        for row, values in zip(rows, values_T, strict=True)
        for index, part in zip(row.sequence_indices, values.split(row.cu_seqlens.diff().tolist()), strict=False)
    }
    regrouped = []
    for row in other_rows:
        parts = [found[index] for index in row.sequence_indices]
        num_padding = len(row.token_ids_T) - sum(len(part) for part in parts)
        regrouped.append(torch.cat([*parts, values_T[0].new_zeros(num_padding)]))
    return regrouped


def token_samples(row: PackedRow, wanted: Collection[int]) -> dict[int, TokenSample]:
    """The sequences of these indices in a trained row, by index; each at most `MAX_SAMPLED_TOKENS` long."""
    found, entropy_T, old_logprobs_T = {}, row.entropy_T, row.old_logprobs_T
    assert entropy_T is not None
    for index, start, length in zip(row.sequence_indices, row.cu_seqlens.tolist(), row.lengths, strict=False):
        if index not in wanted:
            continue
        stop = start + min(length, MAX_SAMPLED_TOKENS) - 1
        is_generated = row.generated_mask_T[start:stop]
        old = (
            None
            if old_logprobs_T is None
            else [0.0, *torch.where(is_generated > 0, old_logprobs_T[start:stop].cpu(), 0.0).tolist()]
        )
        found[index] = TokenSample(
            token_ids=row.token_ids_T[start : stop + 1].tolist(),
            is_generated=[0, *is_generated.int().tolist()],
            generator_logprobs=[0.0, *row.generator_logprobs_T[start:stop].tolist()],
            old_logprobs=old,
            advantages=[0.0, *row.advantages_T[start:stop].tolist()],
            loss_mask=[0, *row.loss_mask_T[start:stop].int().tolist()],
            entropies=[0.0, *(entropy_T[start:stop].cpu() * is_generated).tolist()],
        )
    return found


def by_sequence(row: PackedRow, values_T: torch.Tensor) -> dict[int, np.ndarray]:
    """The values of each sequence of a row, float32 [length], by index; without padding."""
    values = values_T.float().cpu().numpy()
    starts = row.cu_seqlens.tolist()
    return {
        index: values[start : start + length]
        for index, start, length in zip(row.sequence_indices, starts, row.lengths, strict=False)
    }


def tensors_by_sequence(rows: Iterable[PackedRow]) -> dict[int, dict[str, np.ndarray]]:
    """The logprobs, masks and advantages of rows, float32 [length], by sequence and name; without padding."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for row in rows:
        values = {
            "old_logprobs": row.old_logprobs_T,
            "reference_logprobs": row.reference_logprobs_T,
            "loss_mask": row.loss_mask_T,
            "advantages": row.advantages_T,
        }
        for name, values_T in values.items():
            if values_T is not None:
                for index, part in by_sequence(row, values_T).items():
                    found.setdefault(index, {})[name] = part
    return found


def as_row(row: PackedRow, values: Mapping[int, np.ndarray]) -> torch.Tensor:
    """The values of a row's tokens, float32 [T], from those of its sequences; 0 at padding."""
    values_T = torch.zeros(len(row.token_ids_T))
    for index, start, length in zip(row.sequence_indices, row.cu_seqlens.tolist(), row.lengths, strict=False):
        values_T[start : start + length] = torch.from_numpy(values[index])
    return values_T
