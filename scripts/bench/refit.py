"""Speed of a refit inside one host against a plain copy of the same bytes. Prints one JSON line per repeat and one of medians.

Usage: python scripts/bench/refit.py [--mib 256] [--tensor-mib 4] [--repeats 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, full, lengths
from conversion.reshard import reshard
from mrl.policy.arena import Arena
from mrl.refit.exchange import Exchange
from mrl.refit.pull import Puller

NUM_COLUMNS = 1024


def layouts(num_tensors: int, num_rows: int) -> tuple[Layout, dict[int, Layout]]:
    """One trainer rank, and two engine workers on its unit that cut its tensors alternately by rows and (strided) by columns."""
    shape = (num_rows, NUM_COLUMNS)
    source: Layout = {}
    targets: dict[int, Layout] = {0: {}, 1: {}}
    for index in range(num_tensors):
        name = f"layers.{index}.weight"
        source[Slot(name)] = SlotLayout(shape, "bfloat16", (Piece(name, full(shape), full(shape)),))
        for worker, layout in targets.items():
            box = half(shape, dim=index % 2, part=worker)
            layout[Slot(name)] = SlotLayout(lengths(box), "bfloat16", (Piece(name, box, full(lengths(box))),))
    return source, targets


def half(shape: tuple[int, int], *, dim: int, part: int) -> Box:
    """One half of a matrix along `dim`."""
    size = shape[dim] // 2
    return tuple((part * size, (part + 1) * size) if axis == dim else (0, length) for axis, length in enumerate(shape))


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(num_tensors: int, num_rows: int, num_repeats: int) -> list[dict[str, float]]:
    """GB/s of each part for each repeat; the parts take turns, so that a change of the machine's speed meets all of them."""
    source, targets = layouts(num_tensors, num_rows)
    weights = {slot: torch.randn(layout.shape).bfloat16() for slot, layout in source.items()}
    arena = Arena(weights, name="bench-arena")
    schedule = reshard({0: source}, targets, unit_of=dict.fromkeys(targets, 0), buffer_bytes=1 << 30)
    exchange = Exchange(schedule.rank_part(0), weights, arena.handle(), group=None)
    pullers = []
    for worker, layout in targets.items():
        live = {slot: torch.zeros(content.shape, dtype=torch.bfloat16) for slot, content in layout.items()}
        pullers.append(Puller(lambda live=live: live, schedule.worker_part(worker), exchange.handles()))
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    plain, copy = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    parts = {
        "memcpy": lambda: copy.copy_(plain),
        "exchange": lambda: exchange.run(0),
        "pull": lambda: [puller.pull(0) for puller in pullers],
        "verify": lambda: [puller.verify(0) for puller in pullers],
    }
    rows = []
    # The first pass touches fresh pages and is not counted.
    for repeat in range(num_repeats + 1):
        times = {name: seconds(part) for name, part in parts.items()}
        for puller in pullers:
            puller.finish()
        if repeat:
            rows.append({f"{name}_gb_per_s": num_bytes / time_s / 1e9 for name, time_s in times.items()})
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights")
    parser.add_argument("--tensor-mib", type=float, default=4, help="size of each tensor")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_rows = int(arguments.tensor_mib * 2**20) // (2 * NUM_COLUMNS)
    rows = measure(int(arguments.mib / arguments.tensor_mib), num_rows, arguments.repeats)
    for row in rows:
        print(json.dumps({key: round(value, 2) for key, value in row.items()}))
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = {
        f"{name}_over_memcpy": round(median[f"{name}_gb_per_s"] / median["memcpy_gb_per_s"], 3) for name in ("exchange", "pull", "verify")
    }
    print(
        json.dumps({"mib": arguments.mib, "tensor_mib": arguments.tensor_mib, "threads": arguments.threads, "repeats": len(rows), **ratios})
    )


if __name__ == "__main__":
    main()
