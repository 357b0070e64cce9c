# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.long.megatron_child save|load MODEL WEIGHTS LAYOUT`: prints two steps after a checkpoint as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megatron.core

from tests.stack.policy import policy_ranks, save_ranks
from tests.stack.ranks import RankPool


def main(action: str, model: str, weights: str, layout: str) -> None:
    pool, num_ranks = RankPool(policy_ranks.world_size(layout)), policy_ranks.world_size(layout)
    config, folder = policy_ranks.run_config(Path(model), layout), Path(weights)
    try:
        if action == "save":
            metrics, *_ = pool.run(save_ranks.save_after_steps, config, folder, 2, world_size=num_ranks)[0]
        else:
            metrics, *_ = pool.run(save_ranks.load_and_step, config, folder, world_size=num_ranks)[0]
    finally:
        pool.close()
    print(json.dumps({"version": megatron.core.__version__, "steps": metrics}))


if __name__ == "__main__":
    main(*sys.argv[1:])
