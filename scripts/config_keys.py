# SPDX-License-Identifier: Apache-2.0
"""`python scripts/config_keys.py`: writes conversion/families/config_keys.json, keys that transformers and vLLM read.

With it a key that they read and our family does not is refused, without importing them. A stack test fails when the
installed libraries read other keys.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as MODELS_OF_VLLM

DATA = Path(__file__).resolve().parents[1] / "conversion" / "families" / "config_keys.json"
CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
OF_EVERY_ENGINE = ("config/model", "transformers_utils/model_arch_config_convertor")
ROPE = "model_executor/layers/rotary_embedding/__init__"
ROPE_KINDS = ("default", "llama3", "yarn")

WITHOUT_EFFECT = {
    # Labels, and numbers that only training in transformers or new weights use.
    *(
        "architectures",
        "dtype",
        "initializer_range",
        "model_type",
        "name_or_path",
        "output_router_logits",
        "pretraining_tp",
    ),
    *(
        "rescale_prenorm_residual",
        "router_aux_loss_coef",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "use_cache",
    ),
    # Tokens, which the tokenizer names, and lengths, which the run names.
    *("bos_token_id", "eos_token_id", "pad_token_id", "model_max_length", "original_max_position_embeddings"),
    # How something is computed, not what.
    *(
        "chunk_size",
        "expand",
        "mamba_chunk_size",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "num_logits_to_keep",
    ),
    "use_mamba_kernels",
}
"""Keys with any value: they change nothing of a model that is trained and sampled here."""
_HOLDERS = ("config", "hf_config", "hf_text_config", "text_config")


def config_keys() -> dict[str, object]:
    """For each model_type, its `class` in vLLM, `defaults` of transformers, `aliases`, and `off`.

    `off` has keys that others read, with the values that do nothing; null does nothing whatever the key. `engine` has
    such keys of every model in vLLM, `rope` those of rotary positions, by kind.
    """
    found: dict[str, object] = {
        "rope": {kind: _rope(kind) for kind in ROPE_KINDS},
        "engine": _off(read for file in OF_EVERY_ENGINE for read in _reads(_source("vllm", file))),
    }
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for model_type, of_vllm in CLASSES.items():
        kind = CONFIG_MAPPING[model_type]
        fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in base}
        folder = model_type.removesuffix("_text")
        module = f"models/{folder}/modeling_{folder}"
        reads: list[tuple[str, list[object]]] = [(name, [default]) for name, default in fields.items()]
        reads += _reads(_source("transformers", module))
        if of_vllm is not None:
            reads += _reads(_source("vllm", f"model_executor/models/{MODELS_OF_VLLM[of_vllm][0]}"))
        defaults = {name: default for name, default in fields.items() if _is_plain(default)}
        if "rope_parameters" in fields:
            defaults["rope_theta"] = kind.default_theta
        found[model_type] = {"class": of_vllm, "defaults": defaults, "aliases": kind.attribute_map, "off": _off(reads)}
    return found


def _off(reads: Iterable[tuple[str, list[object]]]) -> dict[str, list[object]]:
    off: dict[str, list[object]] = {}
    for name, values in reads:
        is_method = hasattr(dict, name) or callable(getattr(PreTrainedConfig, name, None))
        if name[0] != "_" and name not in WITHOUT_EFFECT and not is_method:
            off[name] = [
                *off.get(name, []),
                *(value for value in values if _is_plain(value) and value not in off.get(name, [])),
            ]
    return dict(sorted(off.items()))


def _source(library: str, module: str) -> ast.AST:
    spec = importlib.util.find_spec(library)
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / f"{module}.py").read_text(encoding="utf-8"))


def _reads(tree: ast.AST) -> Iterator[tuple[str, list[object]]]:
    """The attributes of configs that code reads, each with the values that it takes for missing ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _ends(node.value) in _HOLDERS:
            yield node.attr, []
        if (
            isinstance(node, ast.Call)
            and _ends(node.func) in ("getattr", "hasattr")
            and _ends(node.args[0]) in _HOLDERS
        ):
            name, *default = node.args[1:]
            if isinstance(name, ast.Constant):
                yield str(name.value), [value.value for value in default if isinstance(value, ast.Constant)]


def _rope(kind: str) -> dict[str, list[object]]:
    """Keys that vLLM reads of the rotary positions of a kind: before it looks at the kind, and for this one."""
    function = next(
        node
        for node in ast.walk(_source("vllm", ROPE))
        if isinstance(node, ast.FunctionDef) and node.name == "get_rope"
    )
    off: dict[str, list[object]] = {}
    nodes = [node for statement in function.body for node in _of_kind(statement, kind)]
    for node in nodes:
        if (
            isinstance(node, ast.Subscript)
            and _ends(node.value) == "rope_parameters"
            and isinstance(node.slice, ast.Constant)
        ):
            off.setdefault(str(node.slice.value), [])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _ends(node.func.value) == "rope_parameters"
        ):
            if node.func.attr == "get" and isinstance(node.args[0], ast.Constant):
                values = [
                    value.value
                    for value in node.args[1:]
                    if isinstance(value, ast.Constant) and value.value is not None
                ]
                off[str(node.args[0].value)] = [*off.get(str(node.args[0].value), []), *values]
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In)
            and isinstance(node.comparators[0], ast.Tuple)
        ):
            if _ends(node.left) == "k":
                off |= {str(name.value): [] for name in node.comparators[0].elts if isinstance(name, ast.Constant)}
    return dict(sorted(off.items()))


def _of_kind(node: ast.AST, kind: str) -> Iterator[ast.AST]:
    """Every node but those of branches that are for other kinds."""
    yield node
    if isinstance(node, ast.If) and "scaling_type" in ast.unparse(node.test):
        parts = node.body if f"'{kind}'" in ast.unparse(node.test) else node.orelse
    else:
        parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from _of_kind(part, kind)


def _ends(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_plain(value: object) -> bool:
    """Tells whether JSON can write a default; null means that transformers derives the value."""
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def main() -> None:
    """Rewrites the file."""
    DATA.write_text(json.dumps(config_keys(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
