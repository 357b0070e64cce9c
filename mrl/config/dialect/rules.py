"""Translations of NeMo RL's keys that take more than another name."""

from __future__ import annotations

from mrl.config.datasets import GYM_PROCESSOR
from mrl.config.dialect.torch import Translation, ValueOf
from mrl.config.files import Settings
from mrl.config.rules.environments import NEMO_GYM

COMPILATION = "policy.generation.vllm_kwargs.compilation_config"
USE_INDUCTOR = f"{COMPILATION}.use_inductor"

USE_GYM = "env.should_use_nemo_gym"
GYM_DATA = {"dataset_name": "NemoGymDataset", "processor": GYM_PROCESSOR, "env_name": NEMO_GYM}
"""What NeMo RL's present files say in `data.default` about rows of NeMo Gym."""

REWRITTEN = frozenset([USE_INDUCTOR])
"""Keys that the rules here replace."""


def translate_rest(settings: Settings, value_of: ValueOf) -> Translation:
    """What the rules of this file make of `settings`."""
    found = Translation()
    _inductor(settings, value_of, found)
    _gym(settings, value_of, found)
    return found


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


def _gym(settings: Settings, value_of: ValueOf, found: Translation) -> None:
    """Older files have one line for what are now four: with NeMo Gym, all rows are its own."""
    setting = settings.get(tuple(USE_GYM.split(".")))
    if setting is None or value_of(USE_GYM) is not True or any(key[:2] == ("data", "default") for key in settings):
        return
    for name, value in GYM_DATA.items():
        found.put(USE_GYM, setting, f"data.default.{name}", value)
