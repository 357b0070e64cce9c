# SPDX-License-Identifier: Apache-2.0
"""Models: the folders that hold them, the sizes in their config.json, and `policy.hf_config_overrides`.

With overrides a run starts from a folder with another config.json, so that trainer, engines and conversion read the
same.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from conversion.families.registry import family
from conversion.files.durable import give_new_modes
from conversion.files.hf_folder import (
    COMPANIONS,
    INDEX_FILE,
    SINGLE_FILE,
    files_below,
    files_to_hide,
    read_config,
    weight_files,
    weights_by_file,
    write_json,
)
from conversion.files.hf_weights import check_hf, read_model_config
from conversion.files.reading import read_json
from mrl.config.errors import NotKnown, Problem, prefix_of, spell, value_at
from mrl.config.judge_runs import named_models, with_judge_folders
from mrl.config.parsers import TOOL_PARSER, tool_parser_of
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.ppo import ValueConfig
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

logger = logging.getLogger(__name__)

Section = TypeVar("Section")


_FILE_ENDINGS = tuple(
    f".{name}" for name in "jsonl json parquet arrow gz zst zip csv tsv txt yaml safetensors gguf bin pt pth".split()
)


def is_hub_id(model: str) -> bool:
    """True if `model` can only be a Hub id, `organisation/name`. No Hub name begins or ends with a dot or a dash.

    A name that ends like a file (`data/train.jsonl`) is a path.
    """
    name = r"(?![.-])[\w.-]+(?<![.-])"
    is_id = re.fullmatch(f"{name}/{name}", model, re.ASCII) is not None and not model.lower().endswith(_FILE_ENDINGS)
    return is_id and not os.path.exists(model)


def way_to_prepare(path: str) -> str:
    """The way out for a path of the tiny configs that is missing: the command that makes it; "" for any other path."""
    written = f"{Path(path).as_posix()}/"
    if "prepared/tiny/teacher/" in written:
        return "example 6 of docs/examples.md makes it"
    found = re.search(r"prepared/(tiny|tiny_dense)/(?:model|data)/", written)
    return f"`python -m mrl.prepare {found[1]}` makes it" if found else ""


def cached_folder(model: str, *, with_weights: bool = True) -> Path | None:
    """The snapshot of a Hub id in the local cache, or None if it is not there, or not all of it. Asks no network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return _snapshot(model, with_weights, local_files_only=True)
    return None


def _snapshot(model: str, with_weights: bool, *, local_files_only: bool) -> Path | None:
    """A Hub id's folder, if all its files are there. Weights may be missing after tokenizer-only use or offline."""
    from huggingface_hub import snapshot_download

    patterns: list[str] = [*COMPANIONS, *(["*.safetensors"] if with_weights else [])]
    folder = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=local_files_only))
    try:
        weights = weight_files(folder) if with_weights else []
    except ValueError:
        return None
    return folder if (folder / "config.json").exists() and all(path.exists() for path in weights) else None


def model_folder(model: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: `model` itself, or the snapshot of a Hub id, from the local cache, else downloaded.

    Returns any other text (neither a folder nor `organisation/name`) unchanged. Without weights only config and
    tokenizer are downloaded.

    Raises:
        ValueError: the model is neither in the cache nor can be downloaded.
    """
    if not is_hub_id(model):
        return Path(model)
    if (cached := cached_folder(model, with_weights=with_weights)) is not None:
        return cached
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    logger.info("Downloading %s%s from the Hugging Face Hub", "" if with_weights else "config and tokenizer of ", model)
    reason = "the Hub has no config.json of it, or not all of its safetensors files"
    try:
        if (found := _snapshot(model, with_weights, local_files_only=False)) is not None:
            return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        # Errors of the Hub's library say in later lines that there may be no network.
        reason = str(error).strip().split("\n")[0]
    raise ValueError(
        f"{model} is neither a folder nor complete in the local Hugging Face cache, and it cannot be downloaded: "
        f"{reason}; name a folder, or download the model on a host with a network"
    )


def with_local_folders(config: RunConfig) -> RunConfig:
    """The config with local folders for Hub ids. They hold config and tokenizer, and weights only if they did before.

    Raises:
        ValueError: naming the key; an id is not in the local Hugging Face cache and cannot be downloaded.
    """
    return _with_folders(config, lambda model: model_folder(model, with_weights=False))


def with_cached_folders(config: RunConfig) -> RunConfig:
    """`with_local_folders` for ids in the local Hugging Face cache; others stay unchanged."""
    return _with_folders(config, lambda model: cached_folder(model, with_weights=False) if is_hub_id(model) else None)


def _with_folders(config: RunConfig, folder_of: Callable[[str], Path | None]) -> RunConfig:
    models: list[ModelName] = ["policy"]
    with suppress(NotKnown):
        models += [model for model in config.sections if model != "policy"]
    for model in models:
        section = config.policy if model == "policy" else config.sections[model]
        for key in ("model_name",) if isinstance(section, ValueConfig) else ("model_name", "tokenizer.name"):
            with suppress(NotKnown):
                name = str(value_at(section, key))
                try:
                    section = with_value(section, key, str(folder_of(name) or name))
                except ValueError as error:
                    raise ValueError(f"{prefix_of(model)}{key}={error}") from error
        config = with_section(config, model, section)
    with suppress(NotKnown):
        config = with_judge_folders(config, folder_of)
    with suppress(NotKnown):
        if config.has_engines and value_at(config, TOOL_PARSER) is None:
            config = with_value(config, TOOL_PARSER, tool_parser_of(config))
    return config


def download_weights(config: RunConfig) -> None:
    """Downloads the weights of Hub models that the local cache lacks. ValueError names the key."""
    for key, model in named_models(config).items():
        try:
            model_folder(model)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from error


def find_missing_weights(config: RunConfig) -> list[Problem]:
    """A problem per model whose config.json is here and weights are incomplete. Rules report a missing config.json.

    `config` has the names as given: `is_downloaded` tells which problems a start of the run solves.
    """
    found: dict[Path, Problem] = {}
    for key, name in named_models(config).items():
        folder, reason = Path(name), "give a folder that has them"
        if is_hub_id(name):
            folder, reason = (
                cached_folder(name, with_weights=False) or folder,
                "they are downloaded at the start of the run",
            )
        if folder in found or not os.path.isfile(folder / "config.json"):
            continue
        try:
            missing = [f"no {path.name}" for path in weight_files(folder) if not path.exists()]
        except ValueError as error:
            missing = [str(error).removeprefix(f"{folder}: ")]
        if missing:
            rule = f"the weights are not all here ({missing[0]})"
            found[folder] = Problem("weights/missing", key, name, rule, reason, "to be provided")
    return list(found.values())


def find_wrong_weights(config: RunConfig) -> list[Problem]:
    """A problem for each model whose weights do not fit its config.json, by the headers of their files."""
    found: dict[Path, Problem] = {}
    for key, name in named_models(config).items():
        folder = Path(name)
        try:
            if folder in found or not all(path.exists() for path in weight_files(folder)):
                continue
            family(read_config(folder / "config.json"))
        except (OSError, ValueError):
            continue
        try:
            check_hf(folder)
        except ValueError as error:
            rule, _, way_out = str(error).partition("; ")
            found[folder] = Problem("weights/wrong", key, name, rule, way_out)
    return list(found.values())


def is_downloaded(problem: Problem) -> bool:
    """True if a problem is a model of the Hub that is not here, which the start of a run downloads."""
    return problem.key.endswith(("model_name", "tokenizer.name")) and is_hub_id(problem.value or "")


def with_value(section: Section, key: str, value: object) -> Section:
    """A copy of a config, or of a section, with another value at a dotted key; the original stays as it is."""
    changed = inner = copy.copy(section)
    *parents, name = key.split(".")
    for parent in parents:
        setattr(inner, parent, copy.copy(getattr(inner, parent)))
        inner = getattr(inner, parent)
    setattr(inner, name, value)
    return changed


def with_section(config: RunConfig, model: ModelName, section: PolicyConfig | ValueConfig) -> RunConfig:
    """A copy of the config with another section for a model."""
    if isinstance(section, ValueConfig):
        return with_value(config, "value", section)
    if name := model.partition(":")[2]:
        return with_value(config, "facts", replace(config.facts, teachers={**config.facts.teachers, name: section}))
    return with_value(config, model, section)


class LatentAttention(NamedTuple):
    """Ranks and widths of a head of multi-latent attention."""

    query_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model from which layouts, memory, operations and caches follow. 0 = the model has no such layer."""

    layers: tuple[str, ...]
    """Letters of `hybrid_override_pattern`: `*` attention, `-` MLP, `E` experts, `M` Mamba; `*-` or `*E` of a
    decoder, `G-` or `GE` of one with a gated delta net there.
    """
    hidden: int
    vocabulary: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    is_gated: bool = True
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: int = 0
    mamba_heads: int = 0
    """Heads of Mamba; of gated delta nets the values' heads, then their width, the keys' heads and their width."""
    mamba_head_dim: int = 0
    mamba_groups: int = 0
    mamba_state: int = 0
    mla: LatentAttention | None = None
    model_class: Literal["mamba", "gpt"] = "gpt"
    has_expert_bias: bool = False
    max_sequence_length: int = 0
    num_parameters: int = 0
    num_mtp_steps: int = 0
    window: int = 0
    """Tokens that every other layer reads, from the first on; its attention has sinks, and experts have biases."""

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_projection(self) -> int:
        """Rows of Mamba's in_proj: z, x, B, C and dt; of gated delta nets z, value, query, key, beta and alpha."""
        gates = 2 if self.has_delta_nets else 1
        return 2 * self.mamba_inner + 2 * self.mamba_groups * self.mamba_state + gates * self.mamba_heads

    @property
    def has_delta_nets(self) -> bool:
        """True if layers are gated delta nets; the others' attention then has gates."""
        return any("G" in letters for letters in self.layers)

    @property
    def fc1_factor(self) -> int:
        """Rows of the first matrix of an MLP in units of its width."""
        return 2 if self.is_gated else 1


def read_model(folder: Path, overrides: Mapping[str, object] = MappingProxyType({})) -> ModelSizes:
    """Sizes of the model in a Hugging Face folder, for training, with `overrides` in its config.json.

    Raises:
        ValueError: config.json is missing, unreadable, incomplete, or of a model that cannot be trained. Says the way
            out, not the key.
    """
    return sizes_of(read_hf_config(folder, overrides))


def read_hf_config(folder: Path, overrides: Mapping[str, object]) -> dict[str, object]:
    """The contents of a folder's config.json with `overrides`; ValueError says the way out, not the key."""
    try:
        hf_config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        way_out = way_to_prepare(str(folder)) or "give the folder of a Hugging Face model, or its id"
        raise ValueError(f"no readable config.json in this folder ({type(error).__name__}); {way_out}") from error
    if not isinstance(hf_config, dict):
        raise ValueError("config.json is not a mapping; give the folder of a Hugging Face model")
    return overridden_config(hf_config, overrides)


def sizes_of(hf_config: Mapping[str, object]) -> ModelSizes:
    """Sizes of the model of a config.json."""
    found = family(hf_config)
    arguments = found.megatron_arguments(hf_config)
    given = arguments["transformer"] | arguments["model"]

    def size(name: str) -> int:
        return int(str(given.get(name) or 0))

    pattern, with_experts = given.get("hybrid_override_pattern"), set(found.expert_layers(hf_config))
    linear = given.get("linear_attention_freq")
    layers = tuple(str(pattern or "")) or tuple(
        ("G" if is_linear else "*") + ("E" if index in with_experts else "-")
        for index, is_linear in enumerate(linear if isinstance(linear, list) else [0] * size("num_layers"))
    )
    kinds = set("".join(layers))
    delta = [size(f"linear_{name}") for name in ("num_value_heads", "value_head_dim", "num_key_heads", "key_head_dim")]
    mamba = [size(f"mamba_{name}") for name in ("num_heads", "head_dim", "num_groups", "state_dim")]
    mamba = mamba if "M" in kinds else delta if "G" in kinds else [0] * 4
    mla = [size(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")]
    return ModelSizes(
        layers=layers,
        hidden=size("hidden_size"),
        vocabulary=size("vocab_size"),
        heads=size("num_attention_heads"),
        kv_heads=size("num_query_groups"),
        head_dim=size("kv_channels") if "*" in kinds else 0,
        # Models with only MoE layers may state a dense width that no layer has.
        ffn=size("ffn_hidden_size") if "-" in kinds else 0,
        is_gated=bool(given["gated_linear_unit"]),
        experts=size("num_moe_experts"),
        topk=size("moe_router_topk"),
        expert_ffn=size("moe_ffn_hidden_size"),
        shared_ffn=size("moe_shared_expert_intermediate_size"),
        latent=size("moe_latent_size"),
        **dict(zip(("mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state"), mamba, strict=True)),
        mla=LatentAttention(*mla) if given.get("multi_latent_attention") else None,
        model_class=found.model_class,
        has_expert_bias=bool(given.get("moe_router_enable_expert_bias", False)),
        max_sequence_length=size("max_sequence_length"),
        num_parameters=sum(math.prod(shape) for shape in found.canonical(hf_config).values()),
        num_mtp_steps=int(str(hf_config.get("num_nextn_predict_layers") or 0)) if found.mtp(hf_config) else 0,
        window=window[0] + 1 if isinstance(window := given.get("window_size"), tuple) else 0,
    )


KEY = "hf_config_overrides"
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def overridden_config(hf_config: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """The contents of config.json with `overrides` in place of its own values, each as a whole.

    Rotary positions may have the older or the newer form. YaRN lengthens the context, unless that is overridden, too.
    """
    merged = {**hf_config, **overrides}
    if not overrides.keys() & set(_ROPE):
        return merged
    for name in _ROPE:
        merged.pop(name, None)
    old, new = _rope(hf_config), _rope(overrides)
    is_given = "rope_parameters" in overrides or "rope_scaling" in overrides
    rope = new if is_given else {**old, **new}
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", old.get("rope_theta"))
    # transformers 4, and libraries built on it, read only the older names, and silently use other positions without
    # them.
    scaling = None if rope["rope_type"] == "default" else rope
    merged |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    factor, length = rope.get("factor"), rope.get("original_max_position_embeddings")
    longest = merged.get("max_position_embeddings")
    if rope["rope_type"] == "yarn" and "max_position_embeddings" not in overrides:
        if isinstance(factor, int | float) and isinstance(length, int) and isinstance(longest, int):
            merged["max_position_embeddings"] = max(longest, round(factor * length))
    return merged


def _rope(source: Mapping[str, object]) -> dict[str, object]:
    """Returns rotary position settings under newer names. If `source` has both, transformers 5 takes `rope_scaling`."""
    given = source.get("rope_scaling") or source.get("rope_parameters") or {}
    rope = dict(given) if isinstance(given, dict) else {}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if source.get("rope_theta") is not None:
        rope.setdefault("rope_theta", source["rope_theta"])
    return rope


def find_override_problems(folder: Path, overrides: Mapping[str, object]) -> list[tuple[str, str | None, str]]:
    """Key, value and rule for every override that nothing here reads, and for every one that does not fit the
    checkpoint.
    """
    hf_config = read_config(folder / "config.json")
    merged = _Reads(overridden_config(hf_config, overrides))
    try:
        found = family(merged)
        found.megatron_arguments(merged)
        is_same = found.canonical(merged) == family(hf_config).canonical(hf_config)
    except ValueError as error:
        return [(KEY, None, f"with these, {error}")]
    if not is_same:
        rule = "with these, the tensors of the checkpoint are not the model's; override no sizes"
        return [(KEY, spell(dict(overrides)), rule)]
    read = merged.names | (set(_ROPE) if merged.names & set(_ROPE) else set())
    unread = sorted(overrides.keys() - read)
    rule = "nothing here reads it of this model's config.json; remove it"
    return [(f"{KEY}.{name}", spell(overrides[name]), rule) for name in unread]


def overridden_folder(folder: Path, overrides: Mapping[str, object], *, beside: Path) -> Path:
    """`folder` if it needs no change; else a folder in `beside` with links to its files and another config.json.

    That has the overrides, and tied embeddings only where the weights have them. Weights that only vLLM would read have
    no link; those of sub-folders, where vLLM does not look, have one beside the others. Equal folders are made once.
    All hosts must have `folder` at the same path.
    """
    hf_config = read_config(folder / "config.json")
    merged = overridden_config(read_model_config(folder), overrides)
    hidden, below = files_to_hide(folder), files_below(folder)
    if merged == hf_config and not hidden and not below:
        return folder
    text = json.dumps(merged, indent=2, sort_keys=True)
    parts = [str(folder.absolute()), text, *hidden, *sorted(below)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    target = beside.absolute() / f"model-{digest[:16]}"
    if target.is_dir():
        return target
    if hidden:
        shown = SINGLE_FILE if (folder / SINGLE_FILE).exists() else INDEX_FILE
        logger.warning(
            "%s: the weights are those of %s, as in transformers; not read: %s", folder, shown, ", ".join(hidden)
        )
    beside.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=beside.absolute(), prefix=".model-"))
    try:
        for path in folder.absolute().iterdir():
            if path.name not in ("config.json", *hidden, *[INDEX_FILE] * bool(below)):
                (made / path.name).symlink_to(path)
        (made / "config.json").write_text(text, encoding="utf-8")
        for file, name in below.items():
            (made / name).symlink_to(folder.absolute() / file)
        if below:
            placed = {tensor: below.get(file, file) for tensor, file in weights_by_file(folder).items()}
            write_json(made / INDEX_FILE, {"metadata": {}, "weight_map": placed})
        give_new_modes(made)
        os.replace(made, target)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not target.is_dir():  # another process was faster
            raise
    return target


class _Reads(dict[str, object]):
    """A config.json that records which of its keys are read."""

    def __init__(self, content: Mapping[str, object]) -> None:
        super().__init__(content)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: object = None) -> object:
        self.names.add(name)
        return super().get(name, default)
