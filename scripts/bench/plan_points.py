# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory of measured runs of Megatron-Core, and prints predicted, measured and error of each.

Usage: python -m scripts.bench.plan_points FILE

FILE is a JSON list of runs with every argument that matters for memory. A run with what the model does not know is
named and left out. Constants may be fitted on every second run of a kind in `FITTED`, sorted by name; all others
validate. For the files beside `FITTED` it writes docs/data/plan_FILE.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from mrl.config.model import LatentAttention, ModelSizes
from mrl.plan.activations import BF16, FP32, RECOMPUTED, Row
from mrl.plan.peaks import WHOLE_LOGIT, Stage, logits_bytes, microbatches_in_flight, persistent_bytes, train_peak
from mrl.plan.states import Elements, StateRules, States, state_bytes
from tests.long.record import Row as TableRow
from tests.long.record import record

Point = Mapping[str, Any]
FITTED = Path(__file__).resolve().parents[2] / "tests/data/memory_points/points.json"
Matrix = tuple[int, int]
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_MB = 1e6
_LARGE = 32 * 2**20
NATURAL_IMBALANCE = 1.3
# Bytes of a logit by `cross-entropy-fusion-impl`. te: bfloat16, and the gradient. native: compiled, so that the
# exponential in float32 is a second copy, where the plain one works in place.
FUSED_LOGITS = {"te": 2 * BF16, "native": WHOLE_LOGIT + FP32}
# Keys without which a point cannot be predicted, by the part that holds them.
_NEEDED = {
    "": "id kind quality source hardware num_gpus model seq_length micro_batch num_microbatches tp pp vpp cp ep "
    "etp edp sequence_parallel distributed_optimizer precision main_grad_dtype optimizer recompute "
    "flags measured".split(),
    "model": "layers hidden ffn heads kv_groups head_dim vocab_padded tied_embeddings position_embedding activation "
    "normalization linear_bias qk_layernorm hidden_dropout attention_dropout".split(),
    "optimizer": "name precision_aware main_params exp_avg exp_avg_sq".split(),
    "measured": "rank allocated_bytes max_allocated_bytes max_step".split(),
    "source": ["date"],
}
_PARTS = {
    "moe": "experts topk moe_ffn",
    "mla": "q_lora kv_lora qk_head qk_rope v_head",
    "mamba": "heads head_dim groups state",
}
_MODEL_KEYS = {*_NEEDED["model"], *_PARTS, "name", "max_positions", "hybrid_pattern", "mtp_layers", "mtp_repeated"}
# Names in `ModelSizes` -> those of a point, by the part that holds them.
_SIZES = dict(
    hidden="hidden", vocabulary="vocab_padded", heads="heads", kv_heads="kv_groups", head_dim="head_dim", ffn="ffn"
)
_MOE_SIZES = dict(experts="experts", topk="topk", expert_ffn="moe_ffn", shared_ffn="shared_ffn", latent="latent")
_MAMBA_SIZES = dict(mamba_heads="heads", mamba_head_dim="head_dim", mamba_groups="groups", mamba_state="state")
# Of arguments that are only noted, those that take memory. mrl has no key for them.
_UNKNOWN = {"overlap-moe-expert-parallel-comm"}
# Modules of fine-grained offloading, by the tensors that wait on the host.
_OFFLOADED = {
    "attn_norm": ("*.input",),
    "qkv_linear": ("*.norm",),
    "core_attn": ("*.qkv", "*.scores", "*.softmax"),
    "attn_proj": ("*.core",),
    "mlp_norm": ("E.input", "-.input"),
    "expert_fc1": ("E.dispatched",),
    "moe_act": ("E.fc1",),
}


def shape_of(point: Point) -> ModelSizes:
    """Sizes of the model of a point."""
    model, mla = point["model"], point["model"].get("mla")
    sizes: dict[str, Any] = {
        size: part.get(key) or 0
        for part, keys in (
            (model, _SIZES),
            (model.get("moe") or {}, _MOE_SIZES),
            (model.get("mamba") or {}, _MAMBA_SIZES),
        )
        for size, key in keys.items()
    }
    latent = LatentAttention(*(mla[key] or 0 for key in _PARTS["mla"].split())) if mla else None
    return ModelSizes(layers=layers_of(point), is_gated=model["activation"] == "swiglu", mla=latent, **sizes)


def layers_of(point: Point) -> tuple[str, ...]:
    """The parts of each layer, without those of multi-token prediction."""
    model, moe = point["model"], point["model"].get("moe")
    if pattern := model.get("hybrid_pattern"):
        return tuple(pattern.split("/")[0].replace("|", ""))
    if not moe:
        return ("*-",) * model["layers"]
    frequency = str(moe.get("layer_freq", 1))
    if frequency.isdecimal():
        return tuple("*E" if index % int(frequency) == 0 else "*-" for index in range(model["layers"]))
    # A Python expression of lists of 0 and 1: [0]*3+[1]*11.
    ones = [value for value, _, times in re.findall(r"\[(\d)\](\*(\d+))?", frequency) for _ in range(int(times or 1))]
    return tuple("*E" if one == "1" else "*-" for one in ones)


def chunks_of(point: Point) -> list[list[str]]:
    """Layers of each stage of the pipeline, in their order; stage i is on pipeline rank i mod pp."""
    layers, stages = list(layers_of(point)), point["pp"] * (point["vpp"] or 1)
    pattern = (point["model"].get("hybrid_pattern") or "").split("/")[0]
    if "|" in pattern:
        return [list(part) for part in pattern.split("|")]
    if layout := point.get("pipeline_layout"):
        flat = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
        flat = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), flat)
        sizes = [part.count("t") for part in flat.split("|")]
    else:
        sizes = [len(layers) // stages] * stages
    reported = point["measured"].get("layers_on_rank")
    if isinstance(reported, int) and sum(sizes[-1 :: -point["pp"]]) != reported and not point["vpp"]:
        # Uneven stages: what is known is how many layers the reporting rank has.
        return [layers[:reported] if index < point["pp"] - 1 else layers[-reported:] for index in range(point["pp"])]
    if sum(sizes) != len(layers) or len(sizes) != stages:
        raise ValueError(
            f"{len(layers)} layers in {stages} stages; give measured.layers_on_rank, or pipeline_layout with vpp"
        )
    rest = iter(layers)
    return [list(islice(rest, size)) for size in sizes]


def matrices_of(point: Point, shape: ModelSizes, letter: str) -> tuple[list[Matrix], list[Matrix], int]:
    """Matrices (rows, columns) of a layer part on a rank: dense ones, those of routed experts; and vector elements."""
    model, tp, hidden = point["model"], point["tp"], shape.hidden
    norm = hidden * (1 if model["normalization"] == "RMSNorm" else 2)
    has_bias, fc1 = model["linear_bias"], shape.fc1_factor
    if letter == "M":
        channels = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
        vectors = norm + (channels * 5 + 3 * shape.mamba_heads + shape.mamba_inner) // tp
        return [(shape.mamba_projection // tp, hidden), (hidden, shape.mamba_inner // tp)], [], vectors
    if letter == "-":
        bias = shape.ffn * fc1 // tp + hidden if has_bias else 0
        return [(shape.ffn * fc1 // tp, hidden), (hidden, shape.ffn // tp)], [], norm + bias
    if letter == "E":
        width, etp = shape.latent or hidden, point["etp"] or 1
        dense = [(shape.experts, hidden), (shape.shared_ffn * fc1 // tp, hidden), (hidden, shape.shared_ffn // tp)]
        experts = [(shape.expert_ffn * fc1 // etp, width), (width, shape.expert_ffn // etp)] * (
            shape.experts // (point["ep"] or 1)
        )
        return dense + [(shape.latent, hidden), (hidden, shape.latent)], experts, norm
    if (mla := shape.mla) is not None:
        query, value = shape.heads * (mla.plain + mla.rotary) // tp, shape.heads * mla.value // tp
        queries = [(mla.query_rank, hidden), (query, mla.query_rank)] if mla.query_rank else [(query, hidden)]
        keys = [(mla.kv_rank + mla.rotary, hidden), (shape.heads * (mla.plain + mla.value) // tp, mla.kv_rank)]
        return [*queries, *keys, (hidden, value)], [], norm + mla.query_rank + mla.kv_rank
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    vectors = norm + (rows + hidden if has_bias else 0) + (2 * shape.head_dim if model["qk_layernorm"] else 0)
    return [(rows, hidden), (hidden, shape.heads * shape.head_dim // tp)], [], vectors


def elements_of(point: Point, shape: ModelSizes, layers: list[str], pp_rank: int) -> tuple[Elements, int]:
    """Elements of a rank by Megatron's module sizes, and of one matrix of each shape. `layers` exclude MTP depths."""
    model, hidden = point["model"], shape.hidden
    norm = hidden * (1 if model["normalization"] == "RMSNorm" else 2)
    is_first, is_last = pp_rank == 0, pp_rank == point["pp"] - 1
    embedding, depths = (shape.vocabulary // point["tp"], hidden), (model.get("mtp_layers") or 0) if is_last else 0
    built = layers + mtp_layers(point, shape, 1 if model.get("mtp_repeated") and depths else depths)
    parts = [matrices_of(point, shape, letter) for layer in built for letter in layer]
    dense = [matrix for part in parts for matrix in part[0]] + [(hidden // point["tp"], 2 * hidden)] * (
        len(built) - len(layers)
    )
    experts, vectors = [matrix for part in parts for matrix in part[1]], sum(part[2] for part in parts)
    if is_first:
        dense.append(embedding)
        vectors += (
            model.get("max_positions", point["seq_length"]) * hidden
            if model["position_embedding"] == "learned_absolute"
            else 0
        )
    if is_last:
        vectors += norm * (1 + 3 * (len(built) > len(layers)))
        # Tied embeddings of one stage are one; stages with MTP hold the input embedding, too.
        dense += [embedding] * ((not (model["tied_embeddings"] and is_first)) + (depths > 0 and not is_first))
    distinct = sum(rows * columns for rows, columns in {*dense, *experts})
    return Elements(_size(dense) + vectors, _size(experts)), distinct


def mtp_layers(point: Point, shape: ModelSizes, depths: int) -> list[str]:
    """Layers of that many depths of multi-token prediction."""
    patterns = (point["model"].get("hybrid_pattern") or "").split("/")[1:]
    return (list(patterns[0]) if patterns else [shape.layers[-1]]) * depths


def _size(matrices: list[Matrix]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def states_of(point: Point, elements: Elements) -> States:
    """Bytes of the states after a step."""
    optimizer, num_gpus = point["optimizer"], point["num_gpus"]
    dense = num_gpus // (point["tp"] * point["pp"]) // (point.get("optimizer_instances") or 1)
    experts = max(1, (point["edp"] or 1) // (point.get("optimizer_instances") or 1))
    rules = StateRules(
        *((dense, experts) if point["distributed_optimizer"] else (1, 1)),
        gradient_bytes=_BYTES[point["main_grad_dtype"]],
        main_bytes=_BYTES[optimizer["main_params"]],
        moment_bytes=_BYTES[optimizer["exp_avg"]] + _BYTES[optimizer["exp_avg_sq"]],
        is_precision_aware=optimizer["precision_aware"],
        offloaded=point["flags"].get("optimizer_cpu_offload_fraction", 0.0),
    )
    return state_bytes(elements, rules)


def workspaces(point: Point) -> float:
    """Two of cuBLAS and one of Transformer Engine, four more of it for grouped matrix products.

    torch takes 32 MiB for cuBLAS on Hopper, and since the images of May 2026 on Blackwell
    (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    flags, hardware = point["flags"], point["hardware"]
    is_large = hardware.startswith("H") or (not hardware.startswith("A100") and point["source"]["date"] > "2026-05")
    blas = _LARGE if is_large or "CUBLAS_WORKSPACE_CONFIG" in (flags.get("env") or {}) else 8.5e6
    engine = 4.2e6 if hardware.startswith("A100") else _LARGE
    if flags.get("transformer_impl") == "local":
        # Megatron's own attention writes all scores into one buffer; only layers with experts use Transformer Engine
        # beside it.
        scores = BF16 * point["micro_batch"] * point["model"]["heads"] // point["tp"] * point["seq_length"] ** 2
        return 2 * blas + scores + (engine if point["model"].get("moe") else 0)
    return 2 * blas + engine * (5 if flags.get("grouped_gemm") else 1)


def predict(point: Point) -> dict[str, float]:
    """Allocated bytes after a step, and the peak with its parts."""
    shape, flags, model = shape_of(point), point["flags"], point["model"]
    pp, vpp = point["pp"], point["vpp"] or 1
    pp_rank = pp - 1 if "last" in str(point["measured"]["rank"]) else 0
    chunks, is_last = chunks_of(point)[pp_rank::pp], pp_rank == pp - 1
    elements, distinct = elements_of(point, shape, sum(chunks, []), pp_rank)
    states = states_of(point, elements)
    if point["measured"]["max_step"] == 1:
        # The forward and backward pass of the first step run before Adam's moments exist.
        states = replace(states, optimizer=states.optimizer / 3)
    depths = (model.get("mtp_layers") or 0) if is_last else 0
    chunks[-1] = chunks[-1] + mtp_layers(point, shape, depths)
    microbatches, other = point["num_microbatches"] or 10**6, flags.get("other") or {}
    counts = microbatches_in_flight(
        pp_rank, pp, vpp, microbatches, other.get("microbatch-group-size-per-virtual-pipeline-stage")
    )
    stage = Stage(list(zip(chunks, counts, strict=True)), is_last, depths)
    recompute = point["recompute"] or {}
    is_unfused = flags.get("transformer_impl") == "local" or flags.get("attention_backend") == "unfused"
    is_natural = shape.experts > 0 and not other.get("force_load_balancing")
    row = Row(
        tokens=point["seq_length"] * point["micro_batch"] // point["cp"],
        tp=point["tp"],
        etp=point["etp"] or 1,
        is_sequence_parallel=point["sequence_parallel"],
        imbalance=NATURAL_IMBALANCE if is_natural else 1.0,
        recompute=frozenset(["full"] if recompute.get("granularity") == "full" else recompute.get("modules") or ()),
        offloaded=frozenset(
            tensor for module in flags.get("activation_offload") or () for tensor in _OFFLOADED.get(module, ())
        ),
        scores_length=point["seq_length"] if is_unfused else 0,
        hidden_dropout=model["hidden_dropout"] > 0,
        attention_dropout=model["attention_dropout"] > 0,
    )
    # Since mid 2025 the output layer, too, takes its unused gradient from Transformer Engine's cache of one tensor for
    # each shape.
    unused = BF16 * distinct if flags.get("gradient_accumulation_fusion") and point["source"]["date"] > "2025-06" else 0
    persistent = persistent_bytes(shape, stage, row, pp=pp, workspaces=workspaces(point) + unused)
    logits = logits_bytes(shape, stage, row, FUSED_LOGITS.get(flags.get("cross_entropy_fusion"), WHOLE_LOGIT))
    if other.get("defer-embedding-wgrad-compute") and is_last:
        # Gradients of logits wait for the pipeline to drain.
        waiting = min(other.get("wgrad-deferral-limit") or microbatches, microbatches - 1)
        logits += BF16 * waiting * row.tokens * shape.vocabulary / row.tp
    parts = train_peak(states, shape, stage, row, logits=logits, persistent=persistent)
    return {"allocated": states.allocated + persistent, "peak": sum(parts.values())} | parts


def is_fitted(points: list[Point]) -> dict[str, bool]:
    """Points, by id, on which constants may be fitted: every second one of a kind, sorted by name."""
    kinds = defaultdict[str, list[str]](list)
    for point in points:
        kinds[point["kind"]].append(point["id"])
    return {name: index % 2 == 1 for names in kinds.values() for index, name in enumerate(sorted(names))}


def why_left_out(point: Point) -> str | None:
    """Reason to leave a point out: it is not in the model's scope; None if the model can predict it."""
    parts = {"": point, **{part: point.get(part) or {} for part in _NEEDED if part}}
    missing = [f"{part}.{key}".lstrip(".") for part, keys in _NEEDED.items() for key in keys if key not in parts[part]]
    model = parts["model"]
    missing += [
        f"model.{part}.{key}"
        for part, keys in _PARTS.items()
        if model.get(part)
        for key in keys.split()
        if key not in model[part]
    ]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if point["quality"] == "C" or point["kind"] in ("fp8", "fsdp", "lora", "rl") or point["precision"] != "bf16":
        # Sharded parameters, 8-bit copies, adapters and engines in the same process follow other rules; quality C lacks
        # arguments.
        return (
            f"kind {point['kind']}, quality {point['quality']}, precision {point['precision']}: not what the "
            "model is for"
        )
    optimizer, recompute = point["optimizer"], point["recompute"] or {}
    layers = layers_of(point)
    values = [
        ("layers of moe.layer_freq", len(layers), (len(layers) if model.get("hybrid_pattern") else model["layers"],)),
        ("model.activation", model["activation"], ("swiglu", "squared_relu", "gelu")),
        ("model.normalization", model["normalization"], ("RMSNorm", "LayerNorm")),
        ("optimizer.name", optimizer["name"], ("adam",)),
        ("recompute.granularity", recompute.get("granularity"), (None, "full", "selective")),
        ("dtype", point["main_grad_dtype"], _BYTES),
        *(("dtype", optimizer[key], _BYTES) for key in ("main_params", "exp_avg", "exp_avg_sq")),
        *(("model.hybrid_pattern", letter, "*-EM") for letter in set("".join(layers))),
        *(("recompute.modules", module, RECOMPUTED) for module in recompute.get("modules") or ()),
        *(
            ("flags.activation_offload", module, _OFFLOADED)
            for module in point["flags"].get("activation_offload") or ()
        ),
    ]
    strange = [
        f"{name}={value!r}, known: {', '.join(map(str, known))}" for name, value, known in values if value not in known
    ]
    strange += [f"model.{key}" for key in model if key not in _MODEL_KEYS]
    strange += [f"flags.other.{key}" for key in point["flags"].get("other") or () if key in _UNKNOWN]
    return f"it has what the model does not know: {'; '.join(strange)}" if strange else None


def rows_of(points: list[Point]) -> tuple[list[TableRow], dict[str, str]]:
    """Predicted and measured bytes of every point in MB, with errors as shares; and by id, why points are left out."""
    fitted, rows, left_out = (
        is_fitted(json.loads(FITTED.read_text(encoding="utf-8"))),
        list[TableRow](),
        dict[str, str](),
    )
    for point in points:
        name = str(point.get("id"))
        if reason := why_left_out(point):
            left_out[name] = reason
            continue
        try:
            found = predict(point)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        row: TableRow = {"run": name, "fitted": "yes" if fitted.get(name) else "no"}
        for title, key in (("allocated", "allocated_bytes"), ("peak", "max_allocated_bytes")):
            measured = point["measured"][key]
            row |= {
                f"{title} predicted MB": round(found[title] / _MB),
                f"{title} measured MB": round(measured / _MB) if measured else None,
            }
            row[f"{title} error"] = round(found[title] / measured - 1, 4) if measured else None
        rows.append(row)
    return rows, left_out


def errors_of(rows: list[TableRow], name: str) -> list[float]:
    """Sizes of the errors in a column, of the runs that nothing was fitted on."""
    return [abs(error) for row in rows if row["fitted"] == "no" and isinstance(error := row[name], float)]


def main() -> None:
    """Prints a line for each point, and the errors of those that nothing was fitted on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    rows, left_out = rows_of(json.loads(options.file.read_text(encoding="utf-8")))
    for row in rows:
        print(json.dumps(row))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    for name in ("allocated error", "peak error"):
        errors = errors_of(rows, name)
        if errors:
            print(
                f"{name}: {len(errors)} runs that were not fitted, median {statistics.median(errors):.1%}, worst "
                f"{max(errors):.1%}"
            )
    if options.file.resolve().parent == FITTED.parent:
        record(f"plan_{options.file.stem}", rows, command=f"python -m scripts.bench.plan_points {options.file}")


if __name__ == "__main__":
    main()
