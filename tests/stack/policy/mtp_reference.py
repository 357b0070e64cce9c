# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction as a plain loop over sequences, steps and tokens, with layers of transformers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.stack.policy import policy_ranks
from tests.stack.policy.balancing import imbalance, recorded_router_inputs, scores_of
from tests.stack.policy.layouts import transformers_model
from tests.stack.policy.mtp_ranks import FACTOR, MtpCase

EPSILON = 1e-5
JOINS = ("enorm", "hnorm", "eh_proj")


class Step:
    """A step: attention, experts and the norm behind them as a model of transformers, and what joins its two inputs."""

    def __init__(self, folder: Path, index: int, scratch: Path) -> None:
        """Reads this step of the model in `folder`; transformers models lack these, so it writes one with them."""
        tensors, hf_config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(("backbone.layers.", "mtp."))}
        self.names = {f"backbone.layers.{place}.": f"mtp.layers.{2 * index + place}." for place in range(2)}
        for name, prefix in self.names.items():
            own |= {
                name + key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)
            }
        own["backbone.norm_f.weight"] = own.pop("backbone.layers.1.final_layernorm.weight")
        self.joins = {name: own.pop(f"backbone.layers.0.{name}.weight").requires_grad_() for name in JOINS}
        scratch.mkdir()
        hf_config |= {
            "layers_block_type": ["full_attention", "moe"],
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 0,
        }
        (scratch / "config.json").write_text(json.dumps(hf_config))
        contiguous = {name: tensor.contiguous() for name, tensor in own.items()}
        save_file(contiguous, scratch / "model.safetensors", metadata={"format": "pt"})
        self.model: Any = transformers_model(scratch)

    def __call__(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        width = (hidden_TD.shape[-1],)
        both = [
            F.rms_norm(embedded_TD, width, self.joins["enorm"], EPSILON),
            F.rms_norm(hidden_TD, width, self.joins["hnorm"], EPSILON),
        ]
        joined_TD = torch.cat(both, dim=-1) @ self.joins["eh_proj"].t()
        return self.model.model(inputs_embeds=joined_TD[None]).last_hidden_state[0]

    def gradients(self, scratch: Path) -> dict[str, torch.Tensor]:
        found = _gradients(self.model, scratch)
        for name, tensor in self.joins.items():
            assert tensor.grad is not None
            found[f"backbone.layers.0.{name}.weight"] = tensor.grad
        found["backbone.layers.1.final_layernorm.weight"] = found.pop("backbone.norm_f.weight")
        return {
            prefix + key.removeprefix(name): tensor
            for name, prefix in self.names.items()
            for key, tensor in found.items()
            if key.startswith(name)
        }


class Reference:
    """A model and its steps."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.model: Any = transformers_model(folder)
        num_steps = json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
        self.steps = [Step(folder, index, scratch / f"step{index}") for index in range(num_steps)]

    def learn(self, case: MtpCase, *, balance: float = 0.0) -> dict[str, float]:
        """Mean losses and rates of the random rollouts; gradients are left in the parameters.

        `balance` is the coefficient of the balancing loss of each sequence. A layer's loss is the mean over its passes.
        """
        sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
        counts = [0] * (case.num_steps + 1)
        imbalances: defaultdict[nn.Module, list[torch.Tensor]] = defaultdict(list)
        for _, rollout, _, is_valid in policy_ranks.rollouts():
            prompt, tokens = (
                len(rollout.request.token_ids),
                torch.tensor([*rollout.request.token_ids, *rollout.token_ids.tolist()]),
            )
            with recorded_router_inputs(self.model, *(step.model for step in self.steps)) as routed:
                hidden_KTD = self._hidden_states(tokens, case)
            for gate, routed_TD in routed if balance else ():
                scores_TE = list(scores_of(self.model, gate, routed_TD))
                imbalances[gate].append(imbalance(scores_TE, scores_TE, int(self.model.config.num_experts_per_tok)))
            for ahead, hidden_TD in enumerate(hidden_KTD):
                output_VD = self.model.lm_head.weight
                if ahead > 0:
                    output_VD = output_VD.detach() if case.detaches else output_VD
                # Position t says of token t + 1 + ahead, if that is of the answer.
                said = range(max(prompt - 1 - ahead, 0), len(tokens) - 1 - ahead) if is_valid else range(0)
                counts[ahead] += len(said)
                for t in said:
                    logits_V, label = hidden_TD[t] @ output_VD.t(), tokens[t + 1 + ahead]
                    loss = f"mtp_{ahead}_loss" if ahead else "loss"
                    sums[loss] = sums[loss] - logits_V.log_softmax(0)[label]
                    if ahead:
                        sums[f"mtp_{ahead}_acceptance_rate"] += (logits_V.argmax() == label).float()
        means = {name: value / counts[int(name.split("_")[1]) if name != "loss" else 0] for name, value in sums.items()}
        further = [means[f"mtp_{ahead}_loss"] for ahead in range(1, case.num_steps + 1)]
        total = means["loss"] + FACTOR * torch.stack(further).mean()
        if balance:
            by_layer = torch.stack([torch.stack(values).mean() for values in imbalances.values()])
            total, means["moe/seq_load_balancing_loss"] = total + balance * by_layer.sum(), by_layer.mean()
        total.backward()
        return {name: float(value) for name, value in means.items()}

    def _hidden_states(self, tokens: torch.Tensor, case: MtpCase) -> list[torch.Tensor]:
        """Hidden states of the model and of each step, [T, D]."""
        found = [self.model.model(tokens[None]).last_hidden_state[0]]
        for ahead in range(1, case.num_steps + 1):
            # Behind the end of a sequence Megatron has token 0.
            embedded_TD, hidden_TD = (
                self.model.model.embeddings(F.pad(tokens[ahead:], (0, min(ahead, len(tokens))))),
                found[-1],
            )
            if case.detaches:
                embedded_TD, hidden_TD = embedded_TD.detach(), hidden_TD.detach() if ahead == 1 else hidden_TD
            found.append(self.steps[(ahead - 1) % len(self.steps)](embedded_TD, hidden_TD))
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by canonical name."""
        found = _gradients(self.model, self.scratch / "gradients")
        for index, step in enumerate(self.steps):
            found |= step.gradients(self.scratch / f"gradients{index}")
        return found


def _gradients(model: Any, scratch: Path) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # Files name tensors canonically, with experts apart that are stacked in memory.
    model.save_pretrained(scratch)
    return {
        name: tensor
        for name, tensor in load_file(scratch / "model.safetensors").items()
        if not name.endswith("e_score_correction_bias")
    }
