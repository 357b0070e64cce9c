# SPDX-License-Identifier: Apache-2.0
"""What a run may not silently exchange when it resumes: its model, teacher and tokenizer, and the order of its data, each by content."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from conversion.files.durable import write_atomic
from conversion.files.hf_folder import weight_files
from conversion.files.reading import file_hashes, read_json, sha256_file
from mrl import env
from mrl.config.schema.run import RunConfig
from mrl.data.chat import OWN_TEMPLATE, template_text
from mrl.data.order import epoch_order
from mrl.data.reading import LeftOut, Rows

logger = logging.getLogger(__name__)

Example = TypeVar("Example")
Identity = dict[str, dict[str, str]]
"""For model, tokenizer and data, and for teachers and a critic if there are any: the parts that it consists of, and a checksum of each."""

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
_ALWAYS = ("model", "tokenizer", "data")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*")
# What tools write into config.json beside the model.
_NOT_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def identity_of(config: RunConfig, rows: Rows[Example], read: Sequence[LeftOut]) -> Identity:
    """The identity of a run that is about to start. Reads all weights, unless the cache knows their checksums.

    Raises:
        ValueError: the model is not in a folder, or not whole; or the checksums cannot be kept.
    """
    tokenizer = config.policy.tokenizer
    memory = (env.cache_root() or Path(config.checkpointing.checkpoint_dir).absolute()) / "hashes"
    files = sorted({path for pattern in TOKENIZER_FILES for path in Path(tokenizer.name).glob(pattern) if path.is_file()})
    texts = {path.name: sha256_file(path) for path in files}
    if tokenizer.chat_template != OWN_TEMPLATE:
        texts["policy.tokenizer.chat_template"] = _digest(template_text(tokenizer.chat_template))
    texts["policy.tokenizer.chat_template_kwargs"] = _digest(tokenizer.chat_template_kwargs or {})
    order = epoch_order(len(rows), seed=config.training.seed, epoch=0, shuffle=config.data.shuffle)
    data = {
        "rows": _digest([part.digest for part in read if part.setting.startswith("data.train")]),
        "order (files, split, seed, shuffle)": _digest([rows.id_at(index) for index in order.tolist()]),
    }
    if not config.has_engines:  # a step takes the rows from step x batch on
        data["policy.train_global_batch_size"] = str(config.policy.train_global_batch_size)
    models = {"model": _model_parts(Path(config.policy.model_name), memory)}
    for model in config.models_beside:
        role, _, name = model.partition(":")
        parts = _model_parts(Path(config.of_model(model).policy.model_name), memory)
        models.setdefault(role, {}).update({f"{name}: {part}" if name else part: digest for part, digest in parts.items()})
    if config.teaching is not None:
        models["teacher"]["names of rows"] = _digest(
            {name: config.teacher_of(name) for name in config.teaching.teacher_model_by_agent_name}
        )
    return {**models, "tokenizer": texts, "data": data}


def _model_parts(model: Path, memory: Path) -> dict[str, str]:
    try:
        weights = {path.name: digest for path, digest in file_hashes(weight_files(model), memory).items()}
    except OSError as error:
        raise ValueError(f"{memory} cannot be written: {error}; set {env.MRL_CACHE.name} to another folder") from error
    settings = read_json(model / "config.json")
    assert isinstance(settings, dict)
    return {"config.json": _digest({name: value for name, value in settings.items() if name not in _NOT_MODEL}), **weights}


def check_identity(file: Path, identity: Identity, *, allowed: Sequence[str], resumes_at: int) -> None:
    """Keeps the identity of a run in `file`. ValueError if a run that resumes has another one, in what `allowed` does not name."""
    before = _read(file) if resumes_at and file.exists() else identity
    for name in KEYS:
        parts, old = identity.get(name, {}), before.get(name, {})
        changed = [part for part in parts | old if parts.get(part) != old.get(part)]
        if not changed:
            continue
        text = f"{KEYS[name]}: the run resumes at step {resumes_at} with {OTHER[name]} than before ({', '.join(changed)} differ)"
        if name not in allowed:
            way_out = f"set it back, choose another checkpointing.checkpoint_dir, or set checkpointing.allow_changes=[{name}]"
            raise ValueError(f"{text}; {way_out}")
        logger.warning("%s, as checkpointing.allow_changes says", text)
    write_atomic(file, json.dumps(identity, indent=1))


def _read(file: Path) -> Identity:
    with suppress(ValueError):
        content = read_json(file)
        if isinstance(content, dict) and all(isinstance(content.get(name), dict) for name in _ALWAYS):
            return content
    raise ValueError(f"{file} is damaged; restore it, or remove it if model, tokenizer and data are those of the run")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
