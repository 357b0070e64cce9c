# SPDX-License-Identifier: Apache-2.0
"""The loss of distillation, its gradient by the student's logits and its metrics, ours and NeMo RL's, on random batches.

For `scripts.bench.nemo_parity`. B sequences, S tokens of the longest one, V vocabulary, K tokens that the teacher tells, T packed tokens.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.config.schema.algo import LossConfig
from mrl.policy.distillation import student_scores, top_logits
from mrl.policy.logprobs import OutputColumns, TokenDistribution
from scripts.bench.nemo_code import NemoRl

Pairs = list[tuple[str, Tensor, Tensor]]
Losses = tuple[Tensor, Tensor, dict[str, float]]
"""Loss, its gradient by the student's logits, and metrics."""
VOCABULARY = 23
CHUNK_TOKENS = 3

LOSSES = {
    "distillation, forward": LossConfig(kl_type="forward"),
    "distillation, reverse": LossConfig(kl_type="reverse"),
    "distillation, mixed": LossConfig(kl_type="mixed", mixed_kl_weight=0.3),
    "distillation, mixed, all forward": LossConfig(kl_type="mixed", mixed_kl_weight=1.0),
    "distillation, mixed, all reverse": LossConfig(kl_type="mixed", mixed_kl_weight=0.0),
}
LOSSES |= {f"{name}, whole vocabulary": replace(config, zero_outside_topk=True) for name, config in LOSSES.items()}
"""`loss_fn` of each case."""


@dataclass(frozen=True)
class Inputs:
    """float32. Position [b, s] predicts token s + 1 of sequence b, where the mask of that token counts."""

    student_BSV: Tensor
    teacher_BSV: Tensor
    token_mask_BS: Tensor
    sample_mask_B: Tensor
    k: int
    temperature: float
    teacher_temperature: float

    @property
    def mask_BS(self) -> Tensor:
        """Mask of the positions, one fewer than tokens."""
        return (self.token_mask_BS * self.sample_mask_B[:, None])[:, 1:]


def random_inputs(seed: int, *, k: int | None = None) -> Inputs:
    """Sequences of up to 12 tokens with several turns; k is 1, 4, 8 or 16 if not given.

    By fives, a batch has one sequence, none that counts, or a student that is its teacher.
    """
    draw = torch.Generator().manual_seed(seed)
    num_sequences = 1 if seed % 5 == 1 else int(torch.randint(2, 6, (), generator=draw))
    lengths = torch.randint(2, 13, (num_sequences,), generator=draw)
    positions = torch.arange(int(lengths.max()))
    generated = (torch.rand(num_sequences, len(positions), generator=draw) < 0.6) & (positions < lengths[:, None]) & (positions > 0)
    sample_mask = torch.rand(num_sequences, generator=draw) > 0.25
    if seed % 5 == 2:
        sample_mask[:] = False
    student, teacher = 2 * torch.randn(2, num_sequences, len(positions), VOCABULARY, generator=draw)
    temperatures = (1.0, 1.0) if seed % 2 else (0.7, 1.3)
    if seed % 5 == 3:
        teacher, temperatures = student.clone(), (1.0, 1.0)
    return Inputs(student, teacher, generated.float(), sample_mask.float(), k or (1, 16, 4, 8)[seed % 4], *temperatures)


def group() -> dist.ProcessGroup:
    """This process alone."""
    if not dist.is_initialized():
        store, wait = f"file://{tempfile.mkdtemp()}/store", timedelta(minutes=1)
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=wait)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def our_loss(inputs: Inputs, config: LossConfig, *, num_rows: int) -> Losses:
    """Over rows of packed sequences, whose losses add up."""
    student_BSV = inputs.student_BSV.clone().requires_grad_()
    total, metrics = student_BSV.new_zeros(()), dict[str, float]()

    def columns(logits_BSV: Tensor, temperature: float) -> OutputColumns:
        return OutputColumns(logits_BSV[:, :-1].flatten(0, 1), None, TokenDistribution(VOCABULARY, temperature), group(), CHUNK_TOKENS)

    for part in torch.arange(len(student_BSV)).tensor_split(num_rows):
        if len(part) == 0:
            continue
        scores_TK, tokens_TK = top_logits(columns(inputs.teacher_BSV[part], inputs.teacher_temperature), inputs.k)
        mask_T = inputs.mask_BS[part].flatten()
        # As rows have it: what stands where nothing was generated is 0.
        scores_TK, tokens_TK = scores_TK * mask_T[:, None], tokens_TK * (mask_T[:, None] > 0)
        student = student_scores(columns(student_BSV[part], inputs.temperature), tokens_TK, needs_vocabulary=needs_vocabulary(config))
        loss, found = distillation_loss(student, scores_TK, mask_T / inputs.mask_BS.sum().clamp(min=1), config)
        total = total + loss
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
    (gradient,) = torch.autograd.grad(total, student_BSV)
    return total.detach(), gradient, metrics


def their_loss(nemo: NemoRl, inputs: Inputs, config: LossConfig, *, is_parallel: bool) -> Losses:
    """Loss by their `DistillationLossFn` over one microbatch, with what their `prepare_loss_input` gives it."""
    student_BSV = inputs.student_BSV.clone().requires_grad_()
    teacher = torch.topk(inputs.teacher_BSV / inputs.teacher_temperature, inputs.k, dim=-1)
    names = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
    function = nemo.losses.DistillationLossFn(nemo.losses.DistillationLossConfig(**{name: getattr(config, name) for name in names}))
    scores = import_module("nemo_rl.distributed.model_utils").get_distillation_topk_logprobs_from_logits(
        student_logits=student_BSV / inputs.temperature,
        teacher_topk_logits=teacher.values,
        teacher_topk_indices=teacher.indices,
        zero_outside_topk=config.zero_outside_topk,
        calculate_entropy=config.zero_outside_topk and config.kl_type != "forward",
        **(dict(vocab_parallel_rank=0, vocab_parallel_group=group()) if is_parallel else {}),
    )
    data = nemo.batches.BatchedDataDict(
        {"input_ids": torch.zeros_like(inputs.token_mask_BS), "token_mask": inputs.token_mask_BS, "sample_mask": inputs.sample_mask_B}
    )
    loss, metrics = function(*scores, data, inputs.sample_mask_B.sum(), inputs.mask_BS.sum())
    (gradient,) = torch.autograd.grad(loss, student_BSV)
    return loss.detach(), gradient, metrics


def compare_distillation(nemo: NemoRl, inputs: Inputs, config: LossConfig, *, num_rows: int = 1, is_parallel: bool = False) -> Pairs:
    """Results of both for a batch, by name, ours first. `is_parallel`: by their code for a vocabulary over several ranks."""
    loss, gradient, ours = our_loss(inputs, config, num_rows=num_rows)
    their, their_gradient, theirs = their_loss(nemo, inputs, config, is_parallel=is_parallel)
    shared = [(f"metric {name}", torch.tensor(ours[name]), torch.tensor(float(theirs[name]))) for name in ours if name in theirs]
    return [("loss", loss, their), ("gradient", gradient, their_gradient), *shared]
