# SPDX-License-Identifier: Apache-2.0
"""Predicts seconds of a refit on GPUs from the real schedule and stated rates: docs/data/refit_model.json. Uses no GPU.

Usage: python -m scripts.bench.refit_model [--no-record]
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.plan.facts import PlanModel, read_model
from mrl.plan.hardware import GPUS
from mrl.plan.memory import engine_memory
from mrl.plan.times import NETWORK, refit_calls, refit_times
from mrl.plan.traffic import RefitTraffic, plan_refit, refit_ends
from scripts.bench.least_bytes import least_bytes
from scripts.bench.turns import bench_parser, report
from tests.long.record import Row

MODELS = Path(__file__).parent / "models"
FABRICS = {"InfiniBand": NETWORK, "EFA": (0.80, 0.40)}
"""Shares of eight times 400 Gbit/s a node. For EFA no figure of a single transfer is published; it is assumed below
InfiniBand.
"""
ONE_NODE = (
    "tensor_model_parallel_size=1",
    "sequence_parallel=false",
    "pipeline_model_parallel_size=1",
    "context_parallel_size=1",
)
DEDICATED = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=2")
GB = 1e-9


@dataclass(frozen=True)
class Case:
    """A refit to predict."""

    model: str
    config: str
    num_nodes: int
    words: tuple[str, ...] = ()
    published: str | None = None
    """Seconds of others on the same case, as they state them."""


def megatron(*words: str) -> tuple[str, ...]:
    return tuple(f"policy.megatron_cfg.{word}" for word in words)


NANO, QWEN = ("nemotron3_nano_30b_a3b", "grpo_nanov3.yaml"), ("qwen3_30b_a3b", "grpo_qwen3_30ba3b.yaml")
CASES = (
    Case(*NANO, 1, megatron(*ONE_NODE)),
    # NeMo RL's issue 2808: EP8 and TP2 to engines of TP4 on GPUs of their own.
    Case(
        *NANO, 4, (*DEDICATED, *megatron("pipeline_model_parallel_size=1", "context_parallel_size=1")), "0.48 to 0.55"
    ),
    Case(*NANO, 8),
    Case(*NANO, 32),
    # slime, a model of 30B parameters; memory is woken and packed in that time too.
    Case(*QWEN, 1, published="7"),
    Case(*QWEN, 8),
    Case(*QWEN, 32),
)


def once_per_node(refit: RefitTraffic, config: RunConfig, model: PlanModel) -> RefitTraffic:
    """The refit, were each node to fetch a byte once and to pass it on among its GPUs."""
    ends = refit_ends(config, model)
    least = least_bytes(ends.sources, ends.targets, gpu_of=ends.gpu_of, node_of=ends.node_of)
    share = least.between_nodes_once / least.between_nodes if least.between_nodes else 1.0
    network = round(share * refit.busiest["network"])
    return replace(
        refit,
        busiest=refit.busiest
        | {"network": network, "node": refit.busiest["node"] + refit.busiest["network"] - network},
    )


def rows_of(case: Case, folder: Path) -> list[Row]:
    """The predictions of a case on each kind of node."""
    shutil.copy(MODELS / f"{case.model}.config.json", folder / "config.json")
    config = load_config(
        case.config, [f"policy.model_name={folder}", f"cluster.num_nodes={case.num_nodes}", *case.words]
    )
    model = read_model(config)
    refit = plan_refit(config, model)
    alternative = once_per_node(refit, config, model)
    fabrics = FABRICS if refit.busiest["network"] else {"none": NETWORK}
    rows: list[Row] = []
    for gpu in (GPUS["h100-80g"], GPUS["h200-141g"]):
        weights = engine_memory(config, model, gpu).weights
        for fabric, shares in fabrics.items():
            times, other = (
                refit_times(one, gpu, engine_weights=weights, num_calls=refit_calls(config), network=shares)
                for one in (refit, alternative)
            )
            rows.append(
                {
                    "model": case.model,
                    "GPUs": config.num_slots,
                    "engines": "dedicated" if config.num_dedicated_slots else "colocated",
                    "node": gpu.name,
                    "network": fabric,
                    "network_gb": round(GB * refit.busiest["network"], 2),
                    "node_gb": round(GB * refit.busiest["node"], 2),
                    "rounds": refit.num_rounds,
                    "messages": refit.most_messages,
                    **{f"{name}_s": round(part.low, 3) for name, part in times.parts.items()},
                    "serial_s": round(times.serial.low, 2),
                    "overlapped_s": round(times.overlapped.low, 2),
                    "overlapped_at_half_rates_s": round(times.overlapped.high, 2),
                    "if_once_per_node_s": round(other.overlapped.low, 2),
                    "longest": max(times.parts, key=lambda name: times.parts[name].low),
                    "published_s": case.published,
                }
            )
    return rows


def all_rows() -> Iterator[Row]:
    """The predictions of all cases."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            yield from rows_of(case, Path(folder))


if __name__ == "__main__":
    report("refit_model", all_rows(), bench_parser(__doc__).parse_args())
