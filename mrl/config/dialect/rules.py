"""Translations of NeMo RL's keys that take more than another name."""

from __future__ import annotations

from mrl.config.datasets import GYM_PROCESSOR
from mrl.config.dialect.torch import Translation, ValueOf
from mrl.config.files import COMMAND_LINE, Settings
from mrl.config.passthrough import KEYS_OF_ENGINE_ARGUMENTS
from mrl.config.rules.environments import NEMO_GYM

COMPILATION = "policy.generation.vllm_kwargs.compilation_config"
USE_INDUCTOR = f"{COMPILATION}.use_inductor"

USE_GYM = "env.should_use_nemo_gym"
GYM_DATA = {"dataset_name": "NemoGymDataset", "processor": GYM_PROCESSOR, "env_name": NEMO_GYM}
"""What NeMo RL's present files say in `data.default` about rows of NeMo Gym."""

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

VERIFIER = "env.math.verifier_type"
CHOICES = ("english_multichoice", "multilingual_multichoice")
"""Verifiers of NeMo RL's `math` that look for the letter of an answer, as `mcqa` does here."""

NORM, CLIP = "policy.max_grad_norm", "policy.megatron_cfg.optimizer.clip_grad"

REWRITTEN = frozenset([USE_INDUCTOR, VERIFIER, *ENGINE_ARGUMENTS])
"""Keys that the rules here replace."""
REWRITTEN_SECTIONS = tuple(TEMPLATE_VARIABLES)
"""Sections of which the rules here replace every key."""


def translate_rest(settings: Settings, value_of: ValueOf) -> Translation:
    """What the rules of this file make of `settings`."""
    found = Translation()
    _inductor(settings, value_of, found)
    _gym(settings, value_of, found)
    _verifier(settings, value_of, found)
    _clip(settings, value_of, found)
    for source, target in ENGINE_ARGUMENTS.items():
        _same(source, target, settings, value_of, found)
    for section, target in TEMPLATE_VARIABLES.items():
        for key in map(".".join, settings):
            if key.startswith(f"{section}."):
                _same(key, target + key.removeprefix(section), settings, value_of, found)
    return found


def _same(source: str, target: str, settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """Puts the value of `source` at `target`, unless that is set to another one."""
    setting = settings.get(tuple(source.split(".")))
    if setting is None:
        return
    if tuple(target.split(".")) in settings and value_of(target) != value_of(source):
        found.refuse(source, setting, f"two names of {target}, which is {value_of(target)}", "keep one of them")
    found.put(source, setting, target, value_of(source))


def _inductor(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """vLLM had a switch for what is now the name of a compiler."""
    setting = settings.get(tuple(USE_INDUCTOR.split(".")))
    if setting is None:
        return
    backend = "inductor" if value_of(USE_INDUCTOR) else "eager"
    written = settings.get(tuple(f"{COMPILATION}.backend".split(".")))
    if written is not None and written.value != backend:
        found.refuse(USE_INDUCTOR, setting, f"it means backend={backend}, and {COMPILATION}.backend={written.value}", "keep one of them")
    found.put(USE_INDUCTOR, setting, f"{COMPILATION}.backend", backend)


def _verifier(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """One environment of NeMo RL is two here: problems with a value, and questions with a letter."""
    setting = settings.get(tuple(VERIFIER.split(".")))
    if setting is None or (kind := value_of(VERIFIER)) in ("math", None):
        return
    if kind not in CHOICES:
        found.refuse(VERIFIER, setting, "no such verifier", f"use one of math, {', '.join(CHOICES)}")
        return
    named = {key: other.value for key, other in settings.items() if key[0] == "data" and key[-1] == "env_name"}
    for key, name in {("data", "default", "env_name"): "math", **named}.items():
        if name == "math":
            found.put(VERIFIER, setting, ".".join(key), "mcqa")


def _clip(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """In files that give both, NeMo RL's Megatron reads the optimizer's; who names the other on the command line means that."""
    clip, norm = settings.get(tuple(CLIP.split("."))), settings.get(tuple(NORM.split(".")))
    if clip is None or value_of("policy.dtensor_cfg.enabled") is True or (norm is not None and norm.origin == COMMAND_LINE):
        return
    if (value := value_of(CLIP) or 0.0) != (value_of(NORM) or 0.0):
        found.put(CLIP, clip, NORM, value)


def _gym(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """Older files have one line for what are now four: with NeMo Gym, all rows are its own."""
    setting = settings.get(tuple(USE_GYM.split(".")))
    if setting is None or value_of(USE_GYM) is not True or any(key[:2] == ("data", "default") for key in settings):
        return
    for name, value in GYM_DATA.items():
        found.put(USE_GYM, setting, f"data.default.{name}", value)
