"""Translations of NeMo RL's keys that take more than another name: the DTensor backend, its optimizer and schedule, and a few old forms.

As in NeMo RL, one backend is active, and what a config says to the other has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config.datasets import GYM_PROCESSOR
from mrl.config.dialect.tables import SAME_VALUE
from mrl.config.files import COMMAND_LINE, Key, Setting, Settings, describe, split_key
from mrl.config.passthrough import KEYS_OF_ENGINE_ARGUMENTS
from mrl.config.rules.environments import NEMO_GYM

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
LORA = f"{DTENSOR}.lora_cfg"
OPTIMIZER = "policy.optimizer"
SCHEDULER = "policy.scheduler"

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

COMPILATION = "policy.generation.vllm_kwargs.compilation_config"
USE_INDUCTOR = f"{COMPILATION}.use_inductor"
USE_GYM = "env.should_use_nemo_gym"
GYM_DATA = {"dataset_name": "NemoGymDataset", "processor": GYM_PROCESSOR, "env_name": NEMO_GYM}
"""What NeMo RL's present files say in `data.default` about rows of NeMo Gym."""
VERIFIER = "env.math.verifier_type"
CHOICES = ("english_multichoice", "multilingual_multichoice")
"""Verifiers of NeMo RL's `math` that look for the letter of an answer, as `mcqa` does here."""
NORM, CLIP = "policy.max_grad_norm", f"{MEGATRON}.optimizer.clip_grad"

ENGINE_ARGUMENTS = {
    f"policy.generation.vllm_kwargs.{name}": key
    for name, key in KEYS_OF_ENGINE_ARGUMENTS.items()
    if key == f"policy.generation.vllm_cfg.{name}"
}
"""Arguments of vLLM that have a key of the same name and meaning here."""

_GYM_MODEL = "env.nemo_gym.policy_model.responses_api_models.vllm_model"
_SERVED = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
TEMPLATE_VARIABLES = {
    # What NeMo Gym's server in front of the engines adds to every request.
    f"{_GYM_MODEL}.extra_body.chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    f"{_GYM_MODEL}.chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    f"{_SERVED}.chat_template_kwargs": f"{_SERVED}.default_chat_template_kwargs",
}
"""Sections with values for the chat template, and where these are here."""

REWRITTEN = frozenset([USE_INDUCTOR, VERIFIER, *ENGINE_ARGUMENTS])
"""Keys, besides those of the DTensor backend, that the rules here replace."""
TRANSLATED_SECTIONS = (SCHEDULER, f"{DTENSOR}.env_vars", *TEMPLATE_VARIABLES)
"""Sections of which the rules here replace every key."""


@dataclass
class Translation:
    """What the rules make of the settings of a config."""

    written: Settings
    value_of: Callable[[str], object]
    """The resolved value of a dotted key."""
    settings: Settings = field(default_factory=dict)
    """The new settings; they replace any for the same keys."""
    dropped: set[Key] = field(default_factory=set)
    """Keys of the config that belong to the backend that is not active."""
    lines: list[str] = field(default_factory=list)
    """One for each translated key."""
    problems: list[str] = field(default_factory=list)

    def given(self, key: str) -> Setting | None:
        """The setting of a dotted key, if the config has one."""
        return self.written.get(split_key(key))

    def set(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, without a line of its own."""
        self.settings[split_key(target)] = Setting(value, f"{setting.origin}, from {source}")

    def put(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, and reports it."""
        self.set(source, setting, target, value)
        self.lines.append(f"{describe(split_key(source), setting)} -> {target}={value}")

    def put_same(self, source: str, target: str) -> None:
        """Puts the value of `source`, if that is set, at `target`."""
        if (setting := self.given(source)) is not None:
            self.put(source, setting, target, self.value_of(source))

    def refuse(self, source: str, setting: Setting, rule: str, way_out: str) -> None:
        """Reports that `source` cannot be translated."""
        self.problems.append(f"{describe(split_key(source), setting)}: {rule}; {way_out}")


def translate(settings: Settings, value_of: Callable[[str], object]) -> Translation:
    """What the rules make of `settings`; `value_of` resolves a dotted key of them."""
    found = Translation(settings, value_of)
    _choose_backend(found)
    _inductor(found)
    _gym(found)
    _verifier(found)
    _clip(found)
    for source, target in ENGINE_ARGUMENTS.items():
        _one_name(source, target, found)
    for section, target in TEMPLATE_VARIABLES.items():
        for key in map(".".join, settings):
            if key.startswith(f"{section}."):
                _one_name(key, target + key.removeprefix(section), found)
    return found


def _choose_backend(found: Translation) -> None:
    """Translates what the config says to DTensor, or drops it if Megatron is active."""
    dtensor, megatron = found.given(f"{DTENSOR}.enabled"), found.given(f"{MEGATRON}.enabled")
    uses_dtensor = dtensor is not None and found.value_of(f"{DTENSOR}.enabled") is True
    uses_megatron = megatron is not None and found.value_of(f"{MEGATRON}.enabled") is True
    if uses_megatron or (dtensor is not None and not uses_dtensor):
        if uses_megatron and uses_dtensor and dtensor is not None:
            rule = f"{MEGATRON}.enabled is true, too, and one backend trains"
            found.refuse(f"{DTENSOR}.enabled", dtensor, rule, "set one of them to false")
        sections = (("policy", "dtensor_cfg"), ("policy", "optimizer"), ("policy", "scheduler"))
        found.dropped = {key for key in found.written if key[:2] in sections}
        return
    if megatron is not None and uses_dtensor:
        found.dropped = {key for key in found.written if key[:2] == ("policy", "megatron_cfg")}
    if dtensor is not None:
        found.put(f"{DTENSOR}.enabled", dtensor, f"{MEGATRON}.enabled", True)
    for source, target in SAME_VALUE.items():
        found.put_same(source, target)
    for key, setting in found.written.items():
        if key[:3] == ("policy", "dtensor_cfg", "env_vars") and setting.value != {}:
            found.put_same(".".join(key), ".".join(("policy", "megatron_cfg", *key[2:])))
    _sequence_parallel(found)
    _lora(found)
    _optimizer(found)


def _sequence_parallel(found: Translation) -> None:
    """Megatron trains experts under tensor parallelism only with it, and it changes no value, so it follows the size."""
    size_key = f"{DTENSOR}.tensor_parallel_size"
    setting = found.given(f"{DTENSOR}.sequence_parallel") or found.given(size_key)
    if setting is not None:
        size = found.value_of(size_key if found.given(size_key) else f"{MEGATRON}.tensor_model_parallel_size")
        found.put(f"{DTENSOR}.sequence_parallel", setting, f"{MEGATRON}.sequence_parallel", size != 1)


def _lora(found: Translation) -> None:
    start = found.given(f"{LORA}.lora_A_init")
    if start is not None:
        value = found.value_of(f"{LORA}.lora_A_init")
        if value in LORA_INITS:
            found.put(f"{LORA}.lora_A_init", start, f"{MEGATRON}.peft.lora_A_init_method", LORA_INITS[str(value)])
        else:
            found.refuse(f"{LORA}.lora_A_init", start, "no such start of an adapter", f"use one of {', '.join(LORA_INITS)}")
    names = ["target_modules", "exclude_modules"]
    matches_all = found.given(f"{LORA}.match_all_linear")
    if matches_all is not None and found.value_of(f"{LORA}.match_all_linear") is True:
        found.put(f"{LORA}.match_all_linear", matches_all, f"{MEGATRON}.peft.target_modules", [])
        names.remove("target_modules")
    for name in names:
        if (setting := found.given(f"{LORA}.{name}")) is not None:
            _layers(f"{LORA}.{name}", setting, f"{MEGATRON}.peft.{name}", found)


def _layers(source: str, setting: Setting, target: str, found: Translation) -> None:
    layers = found.value_of(source)
    wanted = {str(layer).removeprefix("*.").removeprefix("*") for layer in layers} if isinstance(layers, list) else {str(layers)}
    names = [name for name, parts in FUSED_LAYERS.items() if wanted.issuperset(parts)]
    if unknown := wanted - {part for name in names for part in FUSED_LAYERS[name]}:
        rule = f"{', '.join(sorted(unknown))}: no whole layer of Megatron, where q_proj, k_proj, v_proj are one; so are gate_proj, up_proj"
        found.refuse(source, setting, rule, f"name them together, or set {target} instead")
    else:
        found.put(source, setting, target, names)


def _optimizer(found: Translation) -> None:
    betas = found.given(f"{OPTIMIZER}.kwargs.betas")
    if betas is not None:
        values = found.value_of(f"{OPTIMIZER}.kwargs.betas")
        if isinstance(values, list) and len(values) == 2:
            for name, value in zip(("adam_beta1", "adam_beta2"), values, strict=True):
                found.put(f"{OPTIMIZER}.kwargs.betas", betas, f"{MEGATRON}.optimizer.{name}", value)
        else:
            found.refuse(f"{OPTIMIZER}.kwargs.betas", betas, "AdamW has two", "write for example [0.9, 0.999]")
    name = found.given(f"{OPTIMIZER}.name")
    if name is not None and (value := found.value_of(f"{OPTIMIZER}.name")) not in OPTIMIZERS:
        found.refuse(f"{OPTIMIZER}.name", name, f"{value} is not supported", f"use {', '.join(OPTIMIZERS)}")
    schedule = [setting for key, setting in found.written.items() if key[:2] == ("policy", "scheduler") and setting.value is not None]
    if schedule:
        _schedule(schedule[0], found)
    elif name is not None:
        _put_schedule(name, {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": 0.0}, None, found)


def _schedule(setting: Setting, found: Translation) -> None:
    """A warmup by LinearLR, if any, then one of ConstantLR, LinearLR, CosineAnnealingLR: what Megatron has, too."""
    written = found.value_of(SCHEDULER)
    parts = [part for part in (written if isinstance(written, list) else [written]) if isinstance(part, dict)]
    phases = [(str(part["name"]).rpartition(".")[2], part.get("kwargs") or {}) for part in parts if "name" in part]
    milestones = [part["milestones"] for part in parts if "milestones" in part]
    lr = found.settings.get(split_key(f"{MEGATRON}.optimizer.lr"))
    peak = lr.value if lr is not None else found.value_of(f"{MEGATRON}.optimizer.lr")
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
    _put_schedule(setting, scheduler, end, found)


def _put_schedule(setting: Setting, scheduler: dict[str, object], end: float | None, found: Translation) -> None:
    for name, value in scheduler.items():
        found.set(SCHEDULER, setting, f"{MEGATRON}.scheduler.{name}", value)
    # A rate that does not decay ends where it is.
    found.set(SCHEDULER, setting, f"{MEGATRON}.optimizer.min_lr", f"${{{MEGATRON}.optimizer.lr}}" if end is None else end)
    values = ", ".join(f"{name}={value}" for name, value in scheduler.items())
    found.lines.append(f"{SCHEDULER} ({setting.origin}) -> {MEGATRON}.scheduler: {values}")


def _one_name(source: str, target: str, found: Translation) -> None:
    """Puts the value of `source` at `target`, and refuses it if that is set to another one."""
    setting = found.given(source)
    if setting is not None and found.given(target) is not None and found.value_of(target) != found.value_of(source):
        found.refuse(source, setting, f"two names of {target}, which is {found.value_of(target)}", "keep one of them")
    found.put_same(source, target)


def _inductor(found: Translation) -> None:
    """vLLM had a switch for what is now the name of a compiler."""
    setting, written = found.given(USE_INDUCTOR), found.given(f"{COMPILATION}.backend")
    if setting is None:
        return
    backend = "inductor" if found.value_of(USE_INDUCTOR) else "eager"
    if written is not None and written.value != backend:
        found.refuse(USE_INDUCTOR, setting, f"it means backend={backend}, and {COMPILATION}.backend={written.value}", "keep one of them")
    found.put(USE_INDUCTOR, setting, f"{COMPILATION}.backend", backend)


def _verifier(found: Translation) -> None:
    """One environment of NeMo RL is two here: problems with a value, and questions with a letter."""
    setting = found.given(VERIFIER)
    if setting is None or (kind := found.value_of(VERIFIER)) in ("math", None):
        return
    if kind not in CHOICES:
        found.refuse(VERIFIER, setting, "no such verifier", f"use one of math, {', '.join(CHOICES)}")
        return
    named = {key: other.value for key, other in found.written.items() if key[0] == "data" and key[-1] == "env_name"}
    for key, name in {("data", "default", "env_name"): "math", **named}.items():
        if name == "math":
            found.put(VERIFIER, setting, ".".join(key), "mcqa")


def _clip(found: Translation) -> None:
    """In files that give both, NeMo RL's Megatron reads the optimizer's; who names the other on the command line means that."""
    clip, norm = found.given(CLIP), found.given(NORM)
    if clip is None or found.value_of(f"{DTENSOR}.enabled") is True or (norm is not None and norm.origin == COMMAND_LINE):
        return
    if (value := found.value_of(CLIP) or 0.0) != (found.value_of(NORM) or 0.0):
        found.put(CLIP, clip, NORM, value)


def _gym(found: Translation) -> None:
    """Older files have one line for what are now four: with NeMo Gym, all rows are its own."""
    setting = found.given(USE_GYM)
    if setting is None or found.value_of(USE_GYM) is not True or any(key[:2] == ("data", "default") for key in found.written):
        return
    for name, value in GYM_DATA.items():
        found.put(USE_GYM, setting, f"data.default.{name}", value)
