# SPDX-License-Identifier: Apache-2.0
"""Bytes and seconds of a refit of adapters alone beside those of all weights, in one run, by turns.

Trainer ranks and engine workers are real processes, as in `scripts.bench.refit`, with the tensors of Qwen3-0.6B at TP2
and adapters of all its linear layers. Both refits are verified. What a trainer does besides is not counted: to merge
the adapters into the weights and to take them out again, which a refit of adapters spares.

Usage: python -m scripts.bench.adapter_refit [--dim 32] [--layers 28] [--repeats 9]
"""

from __future__ import annotations

import itertools
import statistics
from typing import cast

from conversion.adapters import HeldAdapters, adapter_family, engine_adapter_family, linear_layers
from conversion.boxes import Layout
from conversion.families.common import MegatronParallel, VllmParallel
from conversion.families.registry import family
from scripts.bench.refit import processes, refit, seconds
from scripts.bench.turns import bench_parser, lowest_to_highest, take_turns
from tests.stack.refit import children
from tests.stack.refit.children import Child, call_all

QWEN3 = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)
TP = 2


def layouts(num_layers: int, dim: int | None) -> tuple[dict[int, Layout], dict[int, Layout]]:
    """Layouts of ranks and workers: of the weights, or of adapters of rank `dim`."""
    hf_config = QWEN3 | {"num_hidden_layers": num_layers}
    source = target = family(hf_config)
    if dim is not None:
        layers = tuple(linear_layers(source, hf_config))
        target = engine_adapter_family(source, HeldAdapters(layers, dim))
        source = adapter_family(source, layers, dim)
    parallel = MegatronParallel(tp=TP)
    return (
        {
            rank: source.megatron_layout(hf_config, parallel, parallel.coords_of(rank, TP), "bfloat16")
            for rank in range(TP)
        },
        {worker: target.vllm_layout(hf_config, VllmParallel(TP), worker, "bfloat16") for worker in range(TP)},
    )


def main() -> None:
    """Measures and prints."""
    parser = bench_parser(__doc__, repeats=9)
    parser.add_argument("--dim", type=int, default=32, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default: %(default)s)")
    options = parser.parse_args()
    attempts = itertools.count(1)

    def timed(ranks: list[Child], workers: list[Child]) -> tuple[int, float]:
        written, spent = seconds(refit, ranks, workers, next(attempts))
        call_all(workers, children.finish)
        return cast(int, written), spent

    with (
        processes(*layouts(options.layers, None), num_hosts=1, device="cpu") as whole,
        processes(*layouts(options.layers, options.dim), num_hosts=1, device="cpu") as apart,
    ):
        found = take_turns({"weights": lambda: timed(*whole), "adapters": lambda: timed(*apart)}, options.repeats)
    for name, passes in found.items():
        times = [spent for _, spent in passes]
        print(f"{name}: {passes[0][0]:,} bytes, {statistics.median(times):.4f} s ({lowest_to_highest(times)})")
    ratios = [apart[1] / whole[1] for apart, whole in zip(found["adapters"], found["weights"], strict=True)]
    print(
        f"adapters / weights: {found['adapters'][0][0] / found['weights'][0][0]:.4f} of the bytes, "
        f"{statistics.median(ratios):.4f} of the seconds ({lowest_to_highest(ratios)})"
    )


if __name__ == "__main__":
    main()
