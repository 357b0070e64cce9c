# SPDX-License-Identifier: Apache-2.0
"""Check that a resumed run has the same inputs, each by content: model, teacher, tokenizer, and its data order.

Kept rollouts have conditions of their own: all else that they and their verdicts depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TypeVar

import mrl
from conversion.files.hf_folder import VOCABULARIES, weight_files
from conversion.files.hf_weights import read_model_config
from conversion.files.reading import file_hashes, read_json, sha256_file
from mrl import env
from mrl.config.errors import ConfigError
from mrl.config.model import overridden_config, with_value
from mrl.config.own import code_digest
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.data.chat import KEY as DATE
from mrl.data.chat import OWN_TEMPLATE, template_text, writes_date
from mrl.data.order import prompt_order
from mrl.data.reading import LeftOut, Rows
from mrl.store.checkpoints import newest_step

logger = logging.getLogger(__name__)

Example = TypeVar("Example")
Identity = dict[str, dict[str, str]]
"""For model, tokenizer and data, and for teachers and a critic if there are any: the parts that it consists of, and a
checksum of each.
"""

IDENTITY = "identity.json"
"""File in the run folder, copied into each checkpoint."""
KEYS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer",
    "data": "data.train",
    "teacher": "teacher.model_name or on_policy_distillation.teacher_model_by_agent_name",
    "critic": "value.model_name",
}
OTHER = {
    "model": "another model",
    "tokenizer": "another tokenizer",
    "data": "other training data",
    "teacher": "another teacher",
    "critic": "another critic",
}
SEED = "seed"
ORDER = "order (files, split, seed, shuffle)"
"""In the files of all runs; weights decide it, too."""
UNKNOWN = ""
"""Stands for the checksum of what was not read."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "stop_strings", "vllm_kwargs")
_ENGINE = ("precision", "kv_cache_dtype", "max_model_len", "http_server_serving_chat_kwargs")
_FP8 = ("num_first_layers_in_bf16", "num_last_layers_in_bf16", "quantization_ignored_layer_kws")
_JUDGING = (
    "num_generations_per_prompt",
    "max_rollout_turns",
    "seed",
    "invalid_tool_call_advantage",
    "malformed_thinking_advantage",
)
_IRRELEVANT = {"num_workers", "policy_base_url", "policy_api_key"}
_ALWAYS = ("model", "tokenizer", "data")
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*"),
    *VOCABULARIES,
)
_NOT_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def identity_of(config: RunConfig, rows: Rows[Example], read: Sequence[LeftOut]) -> Identity:
    """The identity of a run that is about to start. Reads all weights, unless the cache knows their checksums.

    Raises:
        ValueError: the model is not in a folder, or not whole; or the checksums cannot be kept.
    """
    memory = memory_of(config)

    def hashes(files: Sequence[Path]) -> Mapping[Path, str]:
        try:
            return file_hashes(files, memory)
        except OSError as error:
            raise ValueError(
                f"{memory} cannot be written: {error}; set {env.MRL_CACHE.name} to another folder"
            ) from error

    return {**models_of(config, hashes), "data": data_of(config, rows, read)}


def with_template_date(config: RunConfig) -> RunConfig:
    """The config with its chat template's date: the config's, else the run's so far, else today; unchanged if none."""
    tokenizer = config.policy.tokenizer
    template = None if tokenizer.chat_template == OWN_TEMPLATE else template_text(tokenizer.chat_template)
    if tokenizer.template_date is not None or not writes_date(tokenizer, template):
        return config
    folder = Path(config.checkpointing.checkpoint_dir)
    before = None
    with suppress(ValueError):  # damaged: `check_identity` refuses it
        before = _read(folder / IDENTITY, newest_step(folder))
    day = (before or {}).get("tokenizer", {}).get(DATE) or date.today().isoformat()
    logger.info(
        "The chat template writes the date: all prompts of this run have %s, also after it resumes (%s sets another)",
        day,
        DATE,
    )
    return with_value(config, DATE, day)


def memory_of(config: RunConfig) -> Path:
    """The folder that remembers checksums of weights."""
    return (env.cache_root() or Path(config.checkpointing.checkpoint_dir).absolute()) / "hashes"


def data_of(config: RunConfig, rows: Rows[Example], read: Sequence[LeftOut]) -> dict[str, str]:
    """Section `data` of an identity."""
    order = prompt_order(config, rows.sizes).at(0, len(rows))
    data = {
        SEED: str(config.training.seed) if config.data.shuffle else UNKNOWN,
        "rows": _digest([part.digest for part in read if part.setting.startswith("data.train")]),
        ORDER: _digest([rows.id_at(index) for _, index in order]),
    }
    if pools := config.data.difficulty_pools:
        data["data.difficulty_pools"] = _digest({name: dataclasses.asdict(pool) for name, pool in pools.items()})
    if not config.has_engines:  # a step takes the rows from step x batch on
        data["policy.train_global_batch_size"] = str(config.policy.train_global_batch_size)
    return data


def models_of(config: RunConfig, hashes: Callable[[Sequence[Path]], Mapping[Path, str]]) -> Identity:
    """The parts of an identity besides the data; `hashes` gives the checksums of weights."""
    tokenizer = config.policy.tokenizer
    files = sorted(
        {path for pattern in TOKENIZER_FILES for path in Path(tokenizer.name).glob(pattern) if path.is_file()}
    )
    texts = {path.name: sha256_file(path) for path in files}
    if tokenizer.chat_template != OWN_TEMPLATE:
        texts["policy.tokenizer.chat_template"] = _digest(template_text(tokenizer.chat_template))
    texts["policy.tokenizer.chat_template_kwargs"] = _digest(tokenizer.chat_template_kwargs or {})
    texts[DATE] = tokenizer.template_date or UNKNOWN
    models = {"model": _model_parts(config.policy, hashes)}
    for model in [name for name in config.sections if name != "policy"]:
        role, _, name = model.partition(":")
        parts = _model_parts(config.model(model), hashes)
        models.setdefault(role, {}).update(
            {f"{name}: {part}" if name else part: digest for part, digest in parts.items()}
        )
    if config.teaching is not None:
        models["teacher"]["names of rows"] = _digest(
            {name: config.teacher_of(name) for name in config.teaching.teacher_model_by_agent_name}
        )
    return {**models, "tokenizer": texts}


def _model_parts(model: PolicyConfig, hashes: Callable[[Sequence[Path]], Mapping[Path, str]]) -> dict[str, str]:
    folder = Path(model.model_name)
    weights = {path.relative_to(folder).as_posix(): digest for path, digest in hashes(weight_files(folder)).items()}
    settings = overridden_config(read_model_config(folder), model.hf_config_overrides)
    return {
        "config.json": _digest({name: value for name, value in settings.items() if name not in _NOT_MODEL}),
        **weights,
    }


def check_identity(file: Path, identity: Identity, *, allowed: Sequence[str], resumes_at: int) -> None:
    """Raises ValueError if a resuming run has another identity than in `file`, in what `allowed` does not name."""
    refused, said = find_changes(file, identity, allowed=allowed, resumes_at=resumes_at)
    if refused:
        raise ConfigError(refused)
    for line in said:
        logger.warning("%s", line)


def find_changes(
    file: Path, identity: Identity, *, allowed: Sequence[str], resumes_at: int, names: Iterable[str] = KEYS
) -> tuple[list[str], list[str]]:
    """Changed inputs of a run that resumes: those that refuse it, and those that `allowed` names. `UNKNOWN` equals all.
    ValueError: the file is damaged, and its copy in the checkpoint, too.
    """
    before, refused, said = (_read(file, resumes_at) if resumes_at else None) or identity, list[str](), list[str]()
    for name in names:
        parts, old = identity.get(name, {}), before.get(name, {})
        old = {part: parts[part] for part in (SEED,) if part in parts} | old  # older runs have not written it
        changed = [part for part in parts | old if parts.get(part) not in (UNKNOWN, old.get(part))]
        if not changed:
            continue
        text = (
            f"{KEYS[name]}: the run resumes at step {resumes_at} with {OTHER[name]} than before "
            f"({', '.join(changed).replace(ORDER, f'{ORDER[:-1]}, weight)')} differ)"
        )
        if name in allowed:
            said.append(f"{text}, as checkpointing.allow_changes says")
        else:
            back = "the seed" if SEED in changed else "it"
            elsewhere = "choose another checkpointing.checkpoint_dir"
            way_out = f"set {back} back, {elsewhere}, or set checkpointing.allow_changes=[{name}]"
            refused.append(f"{text}; {way_out}")
    return refused, said


def _read(file: Path, resumes_at: int) -> Identity | None:
    """The identity of a run, or else its copy in the checkpoint from which it resumes; None: there is neither."""
    places = [place for place in (file, file.parent / f"step_{resumes_at}" / file.name) if place.exists()]
    for place in places:
        with suppress(ValueError, OSError):
            content = read_json(place)
            if isinstance(content, dict) and all(isinstance(content.get(name), dict) for name in _ALWAYS):
                return content
    if not places:
        return None
    raise ValueError(f"{file} is damaged; restore it, or remove it if model, tokenizer and data are those of the run")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def conditions_of(config: RunConfig, identity: Identity) -> dict[str, str]:
    """Digests, by key, of everything but weights and prompts that rollouts and verdicts depend on."""
    generation, grpo = config.policy.generation, config.rollouts
    values: dict[str, object] = {"mrl": mrl.__version__}
    values |= {f"policy.generation.{name}": getattr(generation, name) for name in _SAMPLING}
    engine = (*_ENGINE, *_FP8) if generation.vllm_cfg.is_fp8 else _ENGINE
    engine = (*engine, "is_mx") if generation.vllm_cfg.is_mx else engine  # older files do not have it
    values |= {f"policy.generation.vllm_cfg.{name}": getattr(generation.vllm_cfg, name) for name in engine}
    values |= {f"grpo.{name}": getattr(grpo, name) for name in _JUDGING}
    values |= {f"env.{field.name}": getattr(config.env, field.name) for field in dataclasses.fields(config.env)}
    values |= {"reward_penalties": config.reward_penalties, "policy.router_replay": config.policy.router_replay}
    values |= {name: identity[name] for name in ("model", "tokenizer") if name in identity}
    values |= {f"code of {path}": digest for path, digest in own_code(config).items()}
    return {
        key: hashlib.sha256(json.dumps(_as_json(value), sort_keys=True).encode()).hexdigest()[:16]
        for key, value in values.items()
    }


CODE = "code"
"""Key of `own_code` in about.json."""


def own_code(config: RunConfig) -> dict[str, str]:
    """Digests of the code of the user's reward functions and agents, by their paths."""
    own = config.env.own
    return {path: code_digest(path) for path in (*own.functions.values(), *own.agents.values())}


def code_changes(about: Path, config: RunConfig) -> list[str]:
    """Says of which reward functions and agents the code differs from that of the attempt that wrote `about.json`."""
    try:
        found, now = read_json(about), own_code(config)
    except (OSError, ValueError):  # the first attempt, or code that a rule refuses
        return []
    before = found.get(CODE) if isinstance(found, dict) else None
    return [
        f"{path}: its file, or one beside it that it loads, has changed"
        for path, digest in now.items()
        if isinstance(before, dict) and before.get(path, digest) != digest
    ]


def _as_json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _as_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in _IRRELEVANT
        }
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items() if name not in _IRRELEVANT}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
