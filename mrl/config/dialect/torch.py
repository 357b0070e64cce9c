"""What NeMo RL says to its DTensor backend, said to Megatron: sizes, LoRA, a torch optimizer and its schedule.

As there, one backend is active, and what a config says to the other has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config.files import Key, Setting, Settings, describe

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
OPTIMIZER = "policy.optimizer"
SCHEDULER = "policy.scheduler"

SAME_VALUE: dict[str, str] = {
    f"{DTENSOR}.tensor_parallel_size": f"{MEGATRON}.tensor_model_parallel_size",
    f"{DTENSOR}.context_parallel_size": f"{MEGATRON}.context_parallel_size",
    f"{DTENSOR}.expert_parallel_size": f"{MEGATRON}.expert_model_parallel_size",
    f"{DTENSOR}.activation_checkpointing": f"{MEGATRON}.activation_checkpointing",
    f"{DTENSOR}.lora_cfg.enabled": f"{MEGATRON}.peft.enabled",
    f"{DTENSOR}.lora_cfg.dim": f"{MEGATRON}.peft.dim",
    f"{DTENSOR}.lora_cfg.alpha": f"{MEGATRON}.peft.alpha",
    f"{DTENSOR}.lora_cfg.dropout": f"{MEGATRON}.peft.dropout",
    f"{DTENSOR}.lora_cfg.dropout_position": f"{MEGATRON}.peft.dropout_position",
    f"{OPTIMIZER}.kwargs.lr": f"{MEGATRON}.optimizer.lr",
    f"{OPTIMIZER}.kwargs.weight_decay": f"{MEGATRON}.optimizer.weight_decay",
    f"{OPTIMIZER}.kwargs.eps": f"{MEGATRON}.optimizer.adam_eps",
}
"""Key of DTensor -> key of Megatron that takes the same value."""

BY_RULE: dict[str, str] = {
    f"{DTENSOR}.enabled": f"{MEGATRON}.enabled",
    f"{DTENSOR}.sequence_parallel": f"{MEGATRON}.sequence_parallel",
    f"{DTENSOR}.lora_cfg.lora_A_init": f"{MEGATRON}.peft.lora_A_init_method",
    f"{DTENSOR}.lora_cfg.match_all_linear": f"{MEGATRON}.peft.target_modules",
    f"{DTENSOR}.lora_cfg.target_modules": f"{MEGATRON}.peft.target_modules",
    f"{DTENSOR}.lora_cfg.exclude_modules": f"{MEGATRON}.peft.exclude_modules",
    f"{OPTIMIZER}.name": f"{MEGATRON}.optimizer.optimizer",
    f"{OPTIMIZER}.kwargs.betas": f"{MEGATRON}.optimizer.adam_beta1",
    f"{OPTIMIZER}.kwargs.foreach": f"{MEGATRON}.optimizer.optimizer",
    f"{OPTIMIZER}.kwargs.fused": f"{MEGATRON}.optimizer.optimizer",
    f"{DTENSOR}.env_vars": f"{MEGATRON}.env_vars",
    SCHEDULER: f"{MEGATRON}.scheduler",
}
"""Key of DTensor -> key of Megatron whose value a rule below makes of it."""

TRANSLATED_SECTIONS = (SCHEDULER, f"{DTENSOR}.env_vars")
"""Translated keys that may be written as sections."""

TRANSLATED = frozenset([*SAME_VALUE, *BY_RULE])

OPTIMIZERS = ("torch.optim.AdamW",)
LORA_INITS = {"xavier": "xavier", "uniform": "kaiming"}
# Layers of Hugging Face models that Megatron fuses, and how they are called there.
FUSED_LAYERS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "in_proj": ("in_proj",),
    "out_proj": ("out_proj",),
}

ValueOf = Callable[[str], object]
"""The resolved value of a dotted key."""


@dataclass
class Translation:
    """What a config said to DTensor, as settings of Megatron."""

    settings: Settings = field(default_factory=dict)
    """The new settings; they replace any for the same keys."""
    dropped: set[Key] = field(default_factory=set)
    """Keys of the config that belong to the backend that is not active."""
    lines: list[str] = field(default_factory=list)
    """One for each translated key."""
    problems: list[str] = field(default_factory=list)

    def put(self, source: str, setting: Setting, target: str, value: object) -> None:
        self.settings[tuple(target.split("."))] = Setting(value, f"{setting.origin}, from {source}")
        self.lines.append(f"{describe(tuple(source.split('.')), setting)} -> {target}={value}")

    def refuse(self, source: str, setting: Setting, rule: str, way_out: str) -> None:
        self.problems.append(f"{describe(tuple(source.split('.')), setting)}: {rule}; {way_out}")


def belongs_to_dtensor(key: Key) -> bool:
    """Whether the key speaks to NeMo RL's DTensor backend."""
    return key[:2] in (("policy", "dtensor_cfg"), ("policy", "optimizer"), ("policy", "scheduler"))


def translate_torch(settings: Settings, value_of: ValueOf) -> Translation:
    """What `settings` say to DTensor, for Megatron; nothing if Megatron is active in them."""
    found = Translation()
    dtensor, megatron = settings.get(("policy", "dtensor_cfg", "enabled")), settings.get(("policy", "megatron_cfg", "enabled"))
    is_on = {name: given is not None and value_of(f"{name}.enabled") is True for name, given in ((DTENSOR, dtensor), (MEGATRON, megatron))}
    if is_on[DTENSOR] and is_on[MEGATRON]:
        assert dtensor is not None
        found.refuse(f"{DTENSOR}.enabled", dtensor, f"{MEGATRON}.enabled is true, too, and one backend trains", "set one of them to false")
    if is_on[MEGATRON] or (dtensor is not None and not is_on[DTENSOR]):
        found.dropped = {key for key in settings if belongs_to_dtensor(key)}
        return found
    if megatron is not None and is_on[DTENSOR]:
        found.dropped = {key for key in settings if key[:2] == ("policy", "megatron_cfg")}
    if dtensor is not None:
        found.put(f"{DTENSOR}.enabled", dtensor, f"{MEGATRON}.enabled", True)
    for source, target in SAME_VALUE.items():
        if (setting := settings.get(tuple(source.split(".")))) is not None:
            found.put(source, setting, target, value_of(source))
    for key, setting in settings.items():
        if key[:3] == ("policy", "dtensor_cfg", "env_vars") and setting.value != {}:
            found.put(".".join(key), setting, ".".join((*MEGATRON.split("."), *key[2:])), value_of(".".join(key)))
    _sequence_parallel(settings, value_of, found)
    _lora(settings, value_of, found)
    _optimizer(settings, value_of, found)
    return found


def _sequence_parallel(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """Megatron trains experts under tensor parallelism only with it, and it changes no value, so it follows the size."""
    key = f"{DTENSOR}.tensor_parallel_size"
    setting = settings.get(tuple(f"{DTENSOR}.sequence_parallel".split("."))) or settings.get(tuple(key.split(".")))
    if setting is not None:
        size = value_of(key) if tuple(key.split(".")) in settings else value_of(f"{MEGATRON}.tensor_model_parallel_size")
        found.put(f"{DTENSOR}.sequence_parallel", setting, f"{MEGATRON}.sequence_parallel", size != 1)


def _lora(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    lora = f"{DTENSOR}.lora_cfg"
    names = ("lora_A_init", "match_all_linear", "target_modules", "exclude_modules")
    given = {name: settings.get((*lora.split("."), name)) for name in names}
    if (setting := given["lora_A_init"]) is not None:
        value = value_of(f"{lora}.lora_A_init")
        if value in LORA_INITS:
            found.put(f"{lora}.lora_A_init", setting, f"{MEGATRON}.peft.lora_A_init_method", LORA_INITS[str(value)])
        else:
            found.refuse(f"{lora}.lora_A_init", setting, "no such start of an adapter", f"use one of {', '.join(LORA_INITS)}")
    matches_all = given["match_all_linear"]
    if matches_all is not None and value_of(f"{lora}.match_all_linear") is True:
        found.put(f"{lora}.match_all_linear", matches_all, f"{MEGATRON}.peft.target_modules", [])
        given["target_modules"] = None
    for name in ("target_modules", "exclude_modules"):
        if (setting := given[name]) is not None:
            _layers(f"{lora}.{name}", setting, f"{MEGATRON}.peft.{name}", value_of(f"{lora}.{name}"), found)


def _layers(source: str, setting: Setting, target: str, layers: object, found: Translation) -> None:
    wanted = {str(layer).removeprefix("*.").removeprefix("*") for layer in layers} if isinstance(layers, list) else {str(layers)}
    names = [name for name, parts in FUSED_LAYERS.items() if wanted.issuperset(parts)]
    if unknown := wanted - {part for name in names for part in FUSED_LAYERS[name]}:
        rule = f"{', '.join(sorted(unknown))}: no whole layer of Megatron, where q_proj, k_proj, v_proj are one; so are gate_proj, up_proj"
        found.refuse(source, setting, rule, f"name them together, or set {target} instead")
    else:
        found.put(source, setting, target, names)


def _optimizer(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    kwargs = ("policy", "optimizer", "kwargs")
    betas = settings.get((*kwargs, "betas"))
    if betas is not None:
        values = value_of(f"{OPTIMIZER}.kwargs.betas")
        if isinstance(values, list) and len(values) == 2:
            for name, value in zip(("adam_beta1", "adam_beta2"), values, strict=True):
                found.put(f"{OPTIMIZER}.kwargs.betas", betas, f"{MEGATRON}.optimizer.{name}", value)
        else:
            found.refuse(f"{OPTIMIZER}.kwargs.betas", betas, "AdamW has two", "write for example [0.9, 0.999]")
    name = settings.get(("policy", "optimizer", "name"))
    if name is not None and (value := value_of(f"{OPTIMIZER}.name")) not in OPTIMIZERS:
        found.refuse(f"{OPTIMIZER}.name", name, f"{value} is not supported", f"use {', '.join(OPTIMIZERS)}")
    schedule = [key for key in settings if key[:2] == ("policy", "scheduler") and settings[key].value is not None]
    if schedule:
        _schedule(settings[schedule[0]], value_of, found)
    elif name is not None:
        _put_schedule(SCHEDULER, name, {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": 0.0}, None, found)


def _schedule(setting: Setting, value_of: ValueOf, found: Translation) -> None:
    """A warmup by LinearLR, if any, then one of ConstantLR, LinearLR, CosineAnnealingLR: what Megatron has, too."""
    written = value_of(SCHEDULER)
    parts = written if isinstance(written, list) else [written]
    phases = [
        (str(part["name"]).rpartition(".")[2], part.get("kwargs") or {}) for part in parts if isinstance(part, dict) and "name" in part
    ]
    milestones = [part["milestones"] for part in parts if isinstance(part, dict) and "milestones" in part]
    lr = found.settings.get((*MEGATRON.split("."), "optimizer", "lr"))
    peak = lr.value if lr is not None else value_of(f"{MEGATRON}.optimizer.lr")
    scheduler: dict[str, object] = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": 0.0}
    warmup, end = 0, None
    try:
        peak = float(str(peak))
        if phases and phases[0][0] == "LinearLR" and float(phases[0][1].get("end_factor", 1.0)) == 1.0:
            _, kwargs = phases.pop(0)
            warmup = int(kwargs.get("total_iters", 5))
            scheduler |= {"lr_warmup_iters": warmup, "lr_warmup_init": peak * float(kwargs.get("start_factor", 1 / 3))}
        (kind, kwargs) = phases.pop(0) if phases else ("ConstantLR", {"factor": 1.0})
        if kind == "CosineAnnealingLR":
            scheduler |= {"lr_decay_style": "cosine", "lr_decay_iters": warmup + int(kwargs["T_max"])}
            end = float(kwargs.get("eta_min", 0.0))
        elif kind == "LinearLR" and float(kwargs.get("start_factor", 1 / 3)) == 1.0:
            scheduler |= {"lr_decay_style": "linear", "lr_decay_iters": warmup + int(kwargs.get("total_iters", 5))}
            end = peak * float(kwargs.get("end_factor", 1.0))
        elif kind != "ConstantLR" or float(kwargs.get("factor", 1 / 3)) != 1.0:
            raise ValueError(kind)
        if phases or (milestones and milestones != [[warmup]]):
            raise ValueError("further phases")
    except (KeyError, TypeError, ValueError):
        rule = "translated are a LinearLR up to 1.0 and its end as milestone, then ConstantLR at 1.0, LinearLR or CosineAnnealingLR"
        found.refuse(SCHEDULER, setting, rule, f"set it to null and write {MEGATRON}.scheduler")
        return
    _put_schedule(SCHEDULER, setting, scheduler, end, found)


def _put_schedule(source: str, setting: Setting, scheduler: dict[str, object], end: float | None, found: Translation) -> None:
    for name, value in scheduler.items():
        found.settings[(*MEGATRON.split("."), "scheduler", name)] = Setting(value, f"{setting.origin}, from {source}")
    # A rate that does not decay ends where it is.
    lowest: object = f"${{{MEGATRON}.optimizer.lr}}" if end is None else end
    found.settings[(*MEGATRON.split("."), "optimizer", "min_lr")] = Setting(lowest, f"{setting.origin}, from {source}")
    values = ", ".join(f"{name}={value}" for name, value in scheduler.items())
    found.lines.append(f"{source} ({setting.origin}) -> {MEGATRON}.scheduler: {values}")
