# SPDX-License-Identifier: Apache-2.0
"""Cost of building a large run's refit schedule and the bytes moved: a JSON line per case, and docs/data/schedule.json.

Usage: python -m scripts.bench.schedule [--models DIR] [--ranks 256 4096] [--no-record]

DIR holds NAME.config.json, one for each model. Each case has a process of its own, whose memory is what is reported.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from conversion.families.common import MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from scripts.bench.least_bytes import least_bytes
from scripts.bench.turns import alone, bench_parser, report
from tests.long.record import Row

GPUS_PER_NODE = 8
TRAINER = MegatronParallel(tp=2, pp=2, cp=4, ep=8)
ENGINES = {"TP4": VllmParallel(4), "TP4 EP4": VllmParallel(4, 4)}
BUFFER_BYTES = 250_000_000
MODELS = Path(__file__).parent / "models"


def measure(config: Path, num_ranks: int, engine_name: str) -> Row:
    """The row of one schedule. Seconds are processor time: the work is on one core, other host work must not count."""
    hf_config: Mapping[str, object] = json.loads(config.read_text(encoding="utf-8"))
    base_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    found, engine = family(hf_config), ENGINES[engine_name]
    coords = [TRAINER.coords_of(rank, num_ranks) for rank in range(num_ranks)]
    layouts = {place: found.megatron_layout(hf_config, TRAINER, place, "bfloat16", "te") for place in set(coords)}
    sources = {rank: layouts[place] for rank, place in enumerate(coords)}
    workers = [found.vllm_layout(hf_config, engine, worker, "bfloat16") for worker in range(engine.tp)]
    targets = {gpu: workers[gpu % engine.tp] for gpu in range(num_ranks)}
    gpus, nodes = {gpu: gpu for gpu in targets}, {gpu: gpu // GPUS_PER_NODE for gpu in targets}
    with_layouts_s = time.process_time()
    schedule = reshard(sources, targets, gpu_of=gpus, node_of=nodes, buffer_bytes=BUFFER_BYTES)
    built_s = time.process_time()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    least = least_bytes(sources, targets, gpu_of=gpus, node_of=nodes)
    moved, sent = schedule.link_bytes(), schedule.sent_bytes().values()
    part_start = time.process_time()
    _ = schedule.sent_by(0), schedule.received_on(0)
    num_copies = sum(map(len, schedule.pulls(0)))
    fingerprint_start = time.process_time()
    schedule.fingerprint()
    fingerprint_s = time.process_time() - fingerprint_start
    gb = 1e-9 / num_ranks
    return {
        "model": config.name.partition(".")[0],
        "ranks": num_ranks,
        "engines": engine_name,
        "seconds": round(built_s - start, 2),
        "of_them_layouts": round(with_layouts_s - start, 2),
        "peak_mb": round((peak_kib - base_kib) / 1000),
        "part_ms": round(1000 * (fingerprint_start - part_start), 1),
        "fingerprint_ms": round(1000 * fingerprint_s, 1),
        "copies_per_worker": num_copies,
        "rounds": schedule.num_rounds,
        "gpu_gb_per_rank": round(moved["gpu"] * gb, 2),
        "node_gb_per_rank": round(moved["node"] * gb, 2),
        "network_gb_per_rank": round(moved["network"] * gb, 2),
        "most_sent_over_mean": round(max(sent) * len(sent) / sum(sent), 2),
        "moved_over_least": round((moved["node"] + moved["network"]) / least.between_gpus, 4),
        "network_over_least": round(moved["network"] / least.between_nodes, 4),
        "network_gb_per_rank_if_once_per_node": round(least.between_nodes_once * gb, 2),
    }


def main() -> None:
    """Measures, prints, and writes."""
    parser = bench_parser(__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of NAME.config.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 4096])
    options = parser.parse_args()
    cases = product(sorted(options.models.glob("*.config.json")), options.ranks, ENGINES)
    report("schedule", (alone(measure, *case) for case in cases), options)


if __name__ == "__main__":
    main()
