"""A model with `policy.hf_config_overrides`: its folder with another config.json, so that trainer, engines and conversion read the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from conversion.families.registry import family
from mrl.config.rules.ranges import spell

KEY = "policy.hf_config_overrides"
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def overridden_config(hf_config: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """The contents of config.json with `overrides` in place of its own values, each as a whole.

    Rotary positions may be given as older or newer files give them. YaRN lengthens the context, unless that is overridden, too.
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
    merged["rope_parameters"] = rope
    factor, length, longest = rope.get("factor"), rope.get("original_max_position_embeddings"), merged.get("max_position_embeddings")
    if rope["rope_type"] == "yarn" and "max_position_embeddings" not in overrides:
        if isinstance(factor, int | float) and isinstance(length, int) and isinstance(longest, int):
            merged["max_position_embeddings"] = max(longest, round(factor * length))
    return merged


def _rope(source: Mapping[str, object]) -> dict[str, object]:
    """What `source` says of rotary positions, under the newer names."""
    given = source.get("rope_parameters") or source.get("rope_scaling") or {}
    rope = dict(given) if isinstance(given, dict) else {}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if source.get("rope_theta") is not None:
        rope.setdefault("rope_theta", source["rope_theta"])
    return rope


def find_override_problems(folder: Path, overrides: Mapping[str, object]) -> list[str]:
    """A problem for every override that nothing here reads, and for those with which the checkpoint is of another model.

    The folder's own config.json is one that can be trained.
    """
    hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    merged = _Reads(overridden_config(hf_config, overrides))
    try:
        found = family(merged)
        found.megatron_arguments(merged)
        is_same = found.canonical(merged) == family(hf_config).canonical(hf_config)
    except ValueError as error:
        return [f"{KEY}: with these, {error}"]
    if not is_same:
        return [f"{KEY}={spell(dict(overrides))}: with these, the tensors of the checkpoint are not the model's; override no sizes"]
    read = merged.names | (set(_ROPE) if merged.names & set(_ROPE) else set())
    unread = sorted(overrides.keys() - read)
    return [f"{KEY}.{name}={spell(overrides[name])}: nothing here reads it of this model's config.json; remove it" for name in unread]


def overridden_folder(folder: Path, overrides: Mapping[str, object], *, beside: Path) -> Path:
    """`folder` if the overrides change nothing in it; else a folder in `beside` that holds links to its files and the other config.json.

    Equal ones are made once. Where `folder` is, all hosts that read the result must have it.
    """
    hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    merged = overridden_config(hf_config, overrides)
    if merged == hf_config:
        return folder
    text = json.dumps(merged, indent=2, sort_keys=True)
    digest = hashlib.sha256(f"{folder.absolute()}\n{text}".encode()).hexdigest()
    target = beside.absolute() / f"model-{digest[:16]}"
    if target.is_dir():
        return target
    beside.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=beside.absolute(), prefix=".model-"))
    try:
        made.chmod(0o755)
        for path in folder.absolute().iterdir():
            if path.name != "config.json":
                (made / path.name).symlink_to(path)
        (made / "config.json").write_text(text, encoding="utf-8")
        os.replace(made, target)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not target.is_dir():  # another process was faster
            raise
    return target


class _Reads(dict[str, object]):
    """A config.json that remembers which of its keys are looked at."""

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
