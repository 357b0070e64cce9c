"""`python -m mrl.launch`: what brings a run onto a cluster."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def wait(options: argparse.Namespace) -> None:
    """Waits for the nodes of a launched Ray cluster."""
    # Rendering needs no Ray.
    from mrl.cluster.join import wait_for_nodes

    names = options.nodes.split(",") if options.nodes else []
    wait_for_nodes(options.num_nodes or len(names), options.units, names=names, timeout_s=options.timeout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 if the input is at fault; 1 if the cluster is."""
    parser = argparse.ArgumentParser(prog="python -m mrl.launch", description="Brings a run onto a cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    waiting = commands.add_parser(
        "wait", help="wait until all nodes of the Ray cluster at RAY_ADDRESS have joined; scripts/ray.sub calls it"
    )
    waiting.add_argument("--nodes", default="", help="their names, with commas between them")
    waiting.add_argument("--num-nodes", type=int, default=0, help="how many, where the names are not known")
    waiting.add_argument("--units", type=int, required=True, help="worker units of all of them")
    waiting.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    waiting.set_defaults(run=wait)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    try:
        options.run(options)
    except ValueError as error:
        logger.error("[ERROR] %s", error)
        return 2
    except RuntimeError as error:
        logger.error("[ERROR] %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
