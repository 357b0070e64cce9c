# SPDX-License-Identifier: Apache-2.0
"""Translates NeMo RL's keys that need more than renaming: DTensor backend, its optimizer and schedule, and old forms.

One backend is active, as in NeMo RL, and keys of the other have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from mrl.config.errors import COMMAND_LINE, FROM, Problem, spell
from mrl.config.files import Key, Setting, Settings, describe, split_key, wrong
from mrl.config.migration import Note
from mrl.config.passthrough import KEYS_OF_ENGINE_ARGUMENTS
from mrl.config.rules.data import NEMO_GYM
from mrl.config.schema.data import GYM_PROCESSOR
from mrl.config.schema.env import NemoGymConfig
from mrl.config.values import as_written
from mrl.nemo.dialect.tables import GYM_COPIES, GYM_ENDPOINT, GYM_GLOBAL, GYM_HTTP, GYM_KINDS, SAME_VALUE, TRANSLATED

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
OPTIMIZER, SCHEDULER = "policy.optimizer", "policy.scheduler"
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
OPTIMIZERS = ("torch.optim.AdamW", FUSED_ADAM)
_LR = 1e-3
"""The default of both."""
_OPTIONS = {"start_factor", "end_factor", "total_iters", "factor", "T_max", "eta_min"}
LORA = f"{DTENSOR}.lora_cfg"
LORA_INITS = {"xavier": "xavier", "uniform": "kaiming"}
FUSED_LAYERS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "in_proj": ("in_proj",),
    "out_proj": ("out_proj",),
}

NEVER_ADAPTED = {"lm_head", "embed_tokens"}
"""Layers for which no adapter is made, whatever is named."""

COMPILATION = "policy.generation.vllm_kwargs.compilation_config"
USE_INDUCTOR = f"{COMPILATION}.use_inductor"
USE_GYM = "env.should_use_nemo_gym"
GYM_COMMAND = "env.nemo_gym.command"
GYM_DATA = {"dataset_name": "NemoGymDataset", "processor": GYM_PROCESSOR, "env_name": NEMO_GYM}
"""Values with which NeMo RL's present files describe rows of NeMo Gym in `data.default`."""
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

ASYNC = "grpo.async_grpo"
SINGLE_CONTROLLER, SAMPLER = "async_rl", "async_rl.sampler"
SAMPLERS = {
    "in_order": "max_lookahead_versions",
    "windowed": "max_staleness_versions",
    "ready_first": "max_staleness_versions",
    "weight_fifo": "max_staleness_versions",
}
"""Keys that bound how far engines run ahead (1 by default), by the way in which NeMo RL's single controller chooses
finished groups.
"""
UNORDERED = ("windowed", "ready_first")
"""Samplers that take whatever is finished, in any order."""
FRESHEST = f"{SAMPLER}.sample_freshest_first"
RECOMPUTES = f"{SINGLE_CONTROLLER}.recompute_kv_cache_after_weight_updates"

_GYM_MODEL = "env.nemo_gym.policy_model.responses_api_models.vllm_model"
_SERVED = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
TEMPLATE_VARIABLES = {
    f"{_GYM_MODEL}.extra_body.chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    f"{_GYM_MODEL}.chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    f"{_SERVED}.chat_template_kwargs": f"{_SERVED}.default_chat_template_kwargs",
}
"""Sections with values for the chat template, and where these are here."""

REWRITTEN = frozenset(
    [
        USE_INDUCTOR,
        VERIFIER,
        *ENGINE_ARGUMENTS,
        RECOMPUTES,
        FRESHEST,
        *(f"{SAMPLER}.{name}" for name in ("name", *SAMPLERS.values())),
    ]
)
"""Keys, besides those of the DTensor backend, that the rules here replace."""
TRANSLATED_SECTIONS = (SCHEDULER, f"{DTENSOR}.env_vars", *TEMPLATE_VARIABLES)
"""Sections of which the rules here replace every key."""

GYM: Key = ("env", "nemo_gym")
SERVERS: Key = (*GYM, "servers")
"""Keys of NeMo Gym's own config below `env.nemo_gym`, which the run that starts its servers hands on."""
JUDGES = "should_use_judge"
"""Name of the option that sends rows of a server to that server."""

_OWN_OF_GYM = {field.name for field in fields(NemoGymConfig)}


@dataclass
class Translation:
    """Result of the rules for the settings of a config. Rules name keys of any model as those of `policy`."""

    written: Settings
    resolve: Callable[[str], object]
    """The resolved value of a dotted key of `written`."""
    section: str = "policy"
    """The model's section to which the rules are applied."""
    settings: Settings = field(default_factory=dict)
    dropped: set[Key] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    without_effect: list[Note] = field(default_factory=list)
    """Keys that nobody takes here, and why."""
    different: list[Note] = field(default_factory=list)
    """Keys with which NeMo RL does something else, and what mrl does."""

    def name(self, key: str) -> str:
        """The key of this section for a key of `policy`; any other key unchanged."""
        return self.section + key.removeprefix("policy") if key.startswith("policy.") else key

    def given(self, key: str) -> Setting | None:
        """The setting of a dotted key, if the config has one."""
        return self.written.get(split_key(self.name(key)))

    def value_of(self, key: str) -> object:
        """The resolved value of a dotted key."""
        return self.resolve(self.name(key))

    def set(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, without a line of its own."""
        self.settings[split_key(self.name(target))] = Setting(value, f"{setting.origin}{FROM}{self.name(source)}")

    def put(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, and reports it."""
        self.set(source, setting, target, value)
        self.lines.append(f"{describe(split_key(self.name(source)), setting)} -> {self.name(target)}={spell(value)}")

    def put_same(self, source: str, target: str) -> None:
        """Puts the value of `source`, if that is set, at `target`."""
        if (setting := self.given(source)) is not None:
            value = self.value_of(source)
            self.put(
                source, setting, target, as_written(setting, split_key(target)) if value == setting.value else value
            )

    def differ(self, source: str, setting: Setting, how: str) -> None:
        """Reports that mrl reads `source` differently from NeMo RL, and how."""
        self.different.append((split_key(self.name(source)), setting, how))

    def refuse(self, source: str, setting: Setting, rule: str, way_out: str) -> None:
        """Reports that `source` cannot be translated."""
        self.problems.append(wrong("translated", split_key(self.name(source)), setting, rule, way_out))


def translate(settings: Settings, value_of: Callable[[str], object], sections: Sequence[str]) -> Translation:
    """Applies the rules to the models' `sections` of `settings`; `value_of` resolves a dotted key of these."""
    found = Translation(settings, value_of)
    for found.section in sections:
        is_run = found.section == "policy"
        _choose_backend(found)
        _compiler(found)
        if is_run:
            _old_forms(found)
        _norm(found)
        if is_run:
            _single_controller(found)
            _hand_on(found)
        _other_names(found)
    return found


def _other_names(found: Translation) -> None:
    names = dict(ENGINE_ARGUMENTS)
    for section, target in TEMPLATE_VARIABLES.items():
        source = found.name(section)
        if source != section or found.section == "policy":
            below = (key for key in map(".".join, found.written) if key.startswith(f"{source}."))
            names |= {key: target + key.removeprefix(source) for key in below}
    for source, target in names.items():
        setting = found.given(source)
        if setting is not None and found.given(target) is not None:
            value = found.value_of(target)
            if value != found.value_of(source):
                rule = f"two names of {found.name(target)}, which is {value}"
                found.refuse(source, setting, rule, "keep one of them")
        found.put_same(source, target)


def _hand_on(found: Translation) -> None:
    """Passes NeMo Gym's keys to its servers if a run starts them; else only those count that route rows to servers."""
    starts = found.given(GYM_COMMAND) is not None and found.value_of(GYM_COMMAND) is not None
    num_handed = 0
    for key, setting in found.written.items():
        written = split_key(setting.written_as) if setting.written_as else key
        if not is_gyms(written, setting.value):
            continue
        if starts or (written[-1] == JUDGES and found.value_of(".".join(key)) is True):
            found.set(".".join(written), setting, ".".join((*SERVERS, *written[2:])), found.value_of(".".join(key)))
            num_handed += starts
        elif written == key and not is_template_variable(key):
            notes = found.without_effect if setting.value in (None, {}) or _is_global(written[2]) else found.different
            notes.append((key, setting, "an option of NeMo Gym's servers, which env.nemo_gym.command would start"))
    if num_handed:
        found.lines.append(f"env.nemo_gym: keys passed to NeMo Gym's servers: {num_handed}")


def is_gyms(key: Key, value: object) -> bool:
    """True if NeMo Gym's servers take this key: one of their global names, or of a server's section."""
    if key[:2] != GYM or len(key) == 2 or key[2] in _OWN_OF_GYM:
        return False
    name, *rest = key[2:]
    if _is_global(name) or value in (None, {}):
        return True
    return rest[0] in (*GYM_KINDS, *GYM_COPIES) if rest else name.endswith(GYM_ENDPOINT)


def _is_global(name: str) -> bool:
    return name in GYM_GLOBAL or name.startswith(GYM_HTTP)


def is_template_variable(key: Key) -> bool:
    """True if a key is a value for the chat template, which is also one of ours."""
    return ".".join(key).startswith(tuple(f"{section}." for section in TEMPLATE_VARIABLES))


def _choose_backend(found: Translation) -> None:
    """Translates DTensor's keys, or drops them if Megatron is active."""
    dtensor, megatron = found.given(f"{DTENSOR}.enabled"), found.given(f"{MEGATRON}.enabled")
    uses_dtensor = dtensor is not None and found.value_of(f"{DTENSOR}.enabled") is True
    uses_megatron = megatron is not None and found.value_of(f"{MEGATRON}.enabled") is True
    if uses_megatron or (dtensor is not None and not uses_dtensor):
        if uses_megatron and uses_dtensor and dtensor is not None:
            rule = f"{found.name(MEGATRON)}.enabled is true, too, and one backend trains"
            found.refuse(f"{DTENSOR}.enabled", dtensor, rule, "set one of them to false")
        sections = [(found.section, name) for name in ("dtensor_cfg", "optimizer", "scheduler")]
        found.dropped |= {key for key in found.written if key[:2] in sections}
        return
    if megatron is not None and uses_dtensor:
        found.dropped |= {key for key in found.written if key[:2] == (found.section, "megatron_cfg")}
    if dtensor is not None:
        found.put(f"{DTENSOR}.enabled", dtensor, f"{MEGATRON}.enabled", True)
        found.differ(
            f"{DTENSOR}.enabled", dtensor, "Megatron-Core trains, with other kernels and roundings than DTensor"
        )
    own, theirs = f"{MEGATRON}.peft.enabled", f"{LORA}.enabled"
    switch = own if found.given(theirs) is None else theirs
    has_lora = found.given(switch) is not None and found.value_of(switch) is True
    for source, target in SAME_VALUE.items():
        if has_lora or not source.startswith(f"{LORA}.") or (source == theirs and found.given(own) is not None):
            found.put_same(source, target)
    for key, setting in found.written.items():
        if key[:3] == (found.section, "dtensor_cfg", "env_vars") and setting.value != {}:
            found.put_same(".".join(key), ".".join((found.section, "megatron_cfg", *key[2:])))
    # Megatron trains experts under tensor parallelism only with sequence parallelism, which follows the size.
    size_key = f"{DTENSOR}.tensor_parallel_size"
    parallel = found.given(f"{DTENSOR}.sequence_parallel") or found.given(size_key)
    if parallel is not None:
        size = found.value_of(size_key if found.given(size_key) else f"{MEGATRON}.tensor_model_parallel_size")
        found.put(f"{DTENSOR}.sequence_parallel", parallel, f"{MEGATRON}.sequence_parallel", size != 1)
    if has_lora:
        _lora(found)
    else:
        off = sorted(key for key in TRANSLATED if key.startswith(f"{LORA}.") and key != theirs)
        given = [(split_key(found.name(key)), found.given(key)) for key in off]
        found.without_effect += [(key, setting, "LoRA is off") for key, setting in given if setting is not None]
    _optimizer(found)


def _lora(found: Translation) -> None:
    start = found.given(f"{LORA}.lora_A_init")
    if start is not None:
        value = found.value_of(f"{LORA}.lora_A_init")
        if str(value) in LORA_INITS:
            found.put(f"{LORA}.lora_A_init", start, f"{MEGATRON}.peft.lora_A_init_method", LORA_INITS[str(value)])
        else:
            found.refuse(
                f"{LORA}.lora_A_init", start, "no such start of an adapter", f"use one of {', '.join(LORA_INITS)}"
            )
    enabled = found.given(f"{LORA}.enabled")
    if enabled is not None and found.value_of(f"{LORA}.enabled") is True:
        found.differ(
            f"{LORA}.enabled", enabled, "q, k and v share one adapter, as do gate and up; with DTensor each has its own"
        )
    names = ["target_modules", "exclude_modules"]
    matches_all = found.given(f"{LORA}.match_all_linear")
    if matches_all is not None and found.value_of(f"{LORA}.match_all_linear") is True:
        found.put(f"{LORA}.match_all_linear", matches_all, f"{MEGATRON}.peft.target_modules", [])
        names.remove("target_modules")
    for name in names:
        source, target = f"{LORA}.{name}", f"{MEGATRON}.peft.{name}"
        if (setting := found.given(source)) is None:
            continue
        layers = found.value_of(source) or []
        wanted = {str(layer).strip("*").strip(".") for layer in layers} if isinstance(layers, list) else {str(layers)}
        if name == "exclude_modules":
            wanted -= NEVER_ADAPTED
        fused = [layer for layer, parts in FUSED_LAYERS.items() if wanted.issuperset(parts)]
        if unknown := wanted - {part for layer in fused for part in FUSED_LAYERS[layer]}:
            parts = "where q_proj, k_proj, v_proj are one; so are gate_proj, up_proj"
            rule = f"{', '.join(sorted(unknown))}: no whole layer of Megatron, {parts}"
            found.refuse(source, setting, rule, f"name them together, or set {found.name(target)} instead")
        else:
            found.put(source, setting, target, fused)


def _optimizer(found: Translation) -> None:
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


def _single_controller(found: Translation) -> None:
    """Translates how far NeMo RL's single controller lets engines run ahead, and rollouts go on with new weights."""
    asked = next((found.written[key] for key in found.written if key[0] == SINGLE_CONTROLLER), None)
    if asked is None:
        return
    chosen = found.given(f"{SAMPLER}.name")
    name = "in_order" if chosen is None else found.value_of(f"{SAMPLER}.name")
    if chosen is not None and str(name) not in SAMPLERS:
        found.refuse(f"{SAMPLER}.name", chosen, "no such sampler", f"use one of {', '.join(SAMPLERS)}")
        return
    key = f"{SAMPLER}.{SAMPLERS[str(name)]}"
    bound = found.given(key)
    age = 1 if bound is None else found.value_of(key)
    source, setting = (key, bound) if bound is not None else (f"{SAMPLER}.name", chosen or asked)
    for part, value in (
        ("enabled", age != 0),
        ("max_trajectory_age_steps", age or 1),
        ("in_flight_weight_updates", age != 0),
    ):
        found.put(source, setting, f"{ASYNC}.{part}", value)
    if age != 0:
        if name in UNORDERED and not (found.given(FRESHEST) is not None and found.value_of(FRESHEST)):
            how = (
                "steps train groups in the order of the data, whichever is finished first, and none is dropped "
                "for its age"
            )
            found.differ(f"{SAMPLER}.name", chosen or asked, how)
        found.put_same(FRESHEST, f"{ASYNC}.sample_freshest_first")
        found.put_same(RECOMPUTES, f"{ASYNC}.recompute_kv_cache_after_weight_updates")


def _compiler(found: Translation) -> None:
    inductor, compiler = found.given(USE_INDUCTOR), found.given(f"{COMPILATION}.backend")
    if inductor is not None:
        backend = "inductor" if found.value_of(USE_INDUCTOR) else "eager"
        if compiler is not None and compiler.value != backend:
            rule = f"it means backend={backend}, and {found.name(COMPILATION)}.backend={compiler.value}"
            found.refuse(USE_INDUCTOR, inductor, rule, "keep one of them")
        found.put(USE_INDUCTOR, inductor, f"{COMPILATION}.backend", backend)


def _old_forms(found: Translation) -> None:
    """Translates old keys of rows of NeMo Gym and of a verifier."""
    gym = found.given(USE_GYM)
    if (
        gym is not None
        and found.value_of(USE_GYM) is True
        and not any(key[:2] == ("data", "default") for key in found.written)
    ):
        # Older files have one line for what are now four: with NeMo Gym, all rows are its own.
        for name, value in GYM_DATA.items():
            found.put(USE_GYM, gym, f"data.default.{name}", value)
    verifier = found.given(VERIFIER)
    if verifier is not None and (kind := found.value_of(VERIFIER)) not in ("math", None):
        # One environment of NeMo RL is two here: problems with a value, and questions with a letter.
        if kind not in CHOICES:
            found.refuse(VERIFIER, verifier, "no such verifier", f"use one of math, {', '.join(CHOICES)}")
        named = {key: other.value for key, other in found.written.items() if key[0] == "data" and key[-1] == "env_name"}
        for key, name in {("data", "default", "env_name"): "math", **named}.items():
            if kind in CHOICES and name == "math":
                found.put(VERIFIER, verifier, ".".join(key), "mcqa")


def _norm(found: Translation) -> None:
    # If a file has both, NeMo RL's Megatron reads the optimizer's. A user who names the other on the command line means
    # that.
    clip, norm = found.given(CLIP), found.given(NORM)
    if (
        clip is not None
        and found.value_of(f"{DTENSOR}.enabled") is not True
        and (norm is None or norm.origin != COMMAND_LINE)
    ):
        value = found.value_of(CLIP) or 0.0
        if isinstance(value, int | float) and value >= 0 and value != (found.value_of(NORM) or 0.0):
            found.put(CLIP, clip, NORM, value)
