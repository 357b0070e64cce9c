# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.gpu --tier a|b`: runs the checks of a tier and records what they measured in docs/data.

Exit code 1 if a check failed or a bound does not hold. What fails is recorded too, and docs/gpu_status.md shows it.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch

from mrl.gpus import device_variables
from scripts.gpu.plan import CHECKS, Check, Missed, Row, Setup, gpu_columns
from tests.long.record import DATA_FOLDER, record

# The engine's weights, the trainer's, and what else stands beside them.
SHARE_OF_FREE_MEMORY = 0.42


def run(check: Check, setup: Setup, folder: Path) -> bool:
    """Runs one check, prints and records its outcome; whether it passed."""
    rows: list[Row]
    try:
        rows, outcome = check.run(setup), "passed"
    except Missed as missed:
        rows, outcome = missed.rows, f"missed: {missed}"
    except Exception as error:
        traceback.print_exc()
        rows, outcome = [gpu_columns()], f"failed: {type(error).__name__}: {str(error)[:200]}"
    print(f"{check.name}: {outcome}", flush=True)
    for row in rows:
        print(
            "  "
            + ", ".join(
                f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in row.items()
            )
        )
    shown = [{"result": outcome.replace("|", "/").replace("\n", " "), **row} for row in rows]
    record(f"gpu_{check.name}", shown, folder=folder, command=f"bash scripts/gpu_check.sh {check.tier}")
    return outcome == "passed"


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=("a", "b"), default="a")
    parser.add_argument("--only", choices=[check.name for check in CHECKS], help="one check")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the checks themselves, at a small size"
    )
    parser.add_argument("--gigabytes", type=float, help="of weights; by default what fits")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder for the engine of tier b; by default a small model"
    )
    parser.add_argument("--out", type=Path, default=DATA_FOLDER, help="where results go")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this host has no GPU that torch can use", file=sys.stderr)
        return 2
    os.environ |= device_variables(has_gpu=options.device == "cuda")
    gigabytes = options.gigabytes
    if gigabytes is None:
        gigabytes = SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info()[0] / 1e9 if options.device == "cuda" else 0.05
    setup = Setup(options.device, gigabytes, options.model)
    passed = []
    for check in CHECKS:
        if check.name != options.only and (options.only or check.tier != options.tier):
            continue
        if check.missing:
            print(f"{check.name}: left out, this Python has no {', '.join(check.missing)}")
            continue
        passed.append(run(check, setup, options.out))
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
