# SPDX-License-Identifier: Apache-2.0
"""Translates the optimizer and schedule of NeMo RL's DTensor backend."""

from __future__ import annotations

from mrl.config.files import split_key
from mrl.nemo.dialect.translation import Translation

MEGATRON = "policy.megatron_cfg"
OPTIMIZER, SCHEDULER = "policy.optimizer", "policy.scheduler"
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
OPTIMIZERS = ("torch.optim.AdamW", FUSED_ADAM)
_LR = 1e-3
"""The default of both."""
_OPTIONS = {"start_factor", "end_factor", "total_iters", "factor", "T_max", "eta_min"}


def translate_optimizer(found: Translation) -> None:
    """Puts torch's and Transformer Engine's AdamW and their schedule at Megatron's keys."""
    betas, name = found.given(f"{OPTIMIZER}.kwargs.betas"), found.given(f"{OPTIMIZER}.name")
    if betas is not None:
        values = found.value_of(f"{OPTIMIZER}.kwargs.betas")
        if isinstance(values, list) and len(values) == 2:
            for beta, value in zip(("adam_beta1", "adam_beta2"), values, strict=True):
                found.put(f"{OPTIMIZER}.kwargs.betas", betas, f"{MEGATRON}.optimizer.{beta}", value)
        else:
            found.refuse(f"{OPTIMIZER}.kwargs.betas", betas, "AdamW has two", "write for example [0.9, 0.999]")
    if name is not None and (value := found.value_of(f"{OPTIMIZER}.name")) not in OPTIMIZERS:
        found.refuse(f"{OPTIMIZER}.name", name, f"{value} is not supported", f"use {', '.join(OPTIMIZERS)}")
    elif name is not None and value == FUSED_ADAM and found.given(f"{OPTIMIZER}.kwargs.weight_decay") is None:
        found.put(f"{OPTIMIZER}.name", name, f"{MEGATRON}.optimizer.weight_decay", 0.0)  # its default, unlike AdamW's
    own = split_key(found.name(f"{MEGATRON}.optimizer.lr"))
    if (
        name is not None
        and found.given(f"{OPTIMIZER}.kwargs.lr") is None
        and own not in {*found.written} - found.dropped
    ):
        found.put(f"{OPTIMIZER}.name", name, f"{MEGATRON}.optimizer.lr", _LR)
    decay = f"{OPTIMIZER}.kwargs.weight_decay"
    written = found.given(decay)
    # Without the key, torch's AdamW has a decay of its own, and FusedAdam none.
    if (
        found.value_of(decay) != 0
        if written is not None
        else name is not None and found.value_of(f"{OPTIMIZER}.name") != FUSED_ADAM
    ):
        source, setting = (decay, written) if written is not None else (f"{OPTIMIZER}.name", name)
        assert setting is not None
        found.differ(
            source,
            setting,
            "biases, norms and other vectors do not decay, as in Megatron; with DTensor all parameters do",
        )
    schedule = [
        setting
        for key, setting in found.written.items()
        if key[:2] == (found.section, "scheduler") and setting.value is not None
    ]
    if not schedule and name is None:
        return
    scheduler: dict[str, object] = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": 0.0}
    end: object = f"${{{found.name(MEGATRON)}.optimizer.lr}}"
    setting = schedule[0] if schedule else name
    assert setting is not None
    if schedule:
        try:
            changed, last = _schedule(found)
        except (KeyError, TypeError, ValueError):
            rule = (
                "translated are a LinearLR up to 1.0 and its end as milestone, then ConstantLR at 1.0, LinearLR "
                "or CosineAnnealingLR, without further options"
            )
            found.refuse(SCHEDULER, setting, rule, f"set it to null and write {found.name(MEGATRON)}.scheduler")
            return
        scheduler, end = scheduler | changed, end if last is None else last
        if scheduler["lr_decay_style"] == "cosine":
            how = f"the rate stays low after step {scheduler['lr_decay_iters']}, where torch's rises again"
            found.differ(SCHEDULER, setting, how)
    source = SCHEDULER if schedule else f"{OPTIMIZER}.name"
    for part, value in scheduler.items():
        found.set(source, setting, f"{MEGATRON}.scheduler.{part}", value)
    found.set(source, setting, f"{MEGATRON}.optimizer.min_lr", end)
    values = ", ".join(
        f"{part}={f'{value:g}' if isinstance(value, float) else value}" for part, value in scheduler.items()
    )
    alone = "" if schedule else f", without {found.name(SCHEDULER)}"
    found.lines.append(f"{found.name(source)} ({setting.origin}){alone} -> {found.name(MEGATRON)}.scheduler: {values}")


def _schedule(found: Translation) -> tuple[dict[str, object], float | None]:
    """Megatron's schedule and last rate for a LinearLR warmup, if any, then ConstantLR, LinearLR or CosineAnnealingLR.

    Raises:
        KeyError, TypeError, ValueError: the schedule is another one.
    """
    written = found.value_of(SCHEDULER)
    parts = [part for part in (written if isinstance(written, list) else [written]) if isinstance(part, dict)]
    phases = [(str(part["name"]).rpartition(".")[2], part.get("kwargs") or {}) for part in parts if "name" in part]
    milestones = [part["milestones"] for part in parts if "milestones" in part]
    if unread := {name for kind, kwargs in phases for name in kwargs} - _OPTIONS:
        raise ValueError(", ".join(sorted(unread)))
    lr = found.settings.get(split_key(found.name(f"{MEGATRON}.optimizer.lr")))
    peak = float(str(lr.value if lr is not None else found.value_of(f"{MEGATRON}.optimizer.lr")))
    scheduler: dict[str, object] = {}
    warmup, end = 0, None
    if phases and phases[0][0] == "LinearLR" and float(phases[0][1].get("end_factor", 1.0)) == 1.0:
        _, kwargs = phases.pop(0)
        warmup = int(kwargs.get("total_iters", 5))
        scheduler |= {"lr_warmup_iters": warmup, "lr_warmup_init": peak * float(kwargs.get("start_factor", 1 / 3))}
    kind, kwargs = phases.pop(0) if phases else ("ConstantLR", {"factor": 1.0})
    if kind == "CosineAnnealingLR":
        scheduler |= {"lr_decay_style": "cosine", "lr_decay_iters": warmup + int(kwargs["T_max"])}
        end = float(kwargs.get("eta_min", 0.0))
    elif kind == "LinearLR" and float(kwargs.get("start_factor", 1 / 3)) == 1.0:
        scheduler |= {"lr_decay_style": "linear", "lr_decay_iters": warmup + int(kwargs.get("total_iters", 5))}
        end = peak * float(kwargs.get("end_factor", 1.0))
    elif kind != "ConstantLR" or float(kwargs.get("factor", 1 / 3)) != 1.0:
        raise ValueError(kind)
    if phases or (milestones and milestones != [[warmup]] and (warmup or milestones != [[]])):
        raise ValueError("further phases")
    return scheduler, end
