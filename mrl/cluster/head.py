"""Whether a launcher's Ray cluster is there at all. Ray itself would try for minutes, and say little."""

from __future__ import annotations

import logging
import re
import socket

import ray

from mrl import env

CONNECT_TIMEOUT_S = 10.0


class NoCluster(RuntimeError):
    """There is no cluster to join; the message says where it was looked for and what to do."""


def join_cluster() -> None:
    """Joins the launcher's cluster (RAY_ADDRESS).

    Raises:
        NoCluster: nobody answers there, or not to us.
    """
    address = env.RAY_ADDRESS.read()
    if address is None:
        raise NoCluster("RAY_ADDRESS is not set: several nodes are a Ray cluster, which scripts/ray.sub or python -m mrl.launch starts")
    found = re.fullmatch(r"(.+):(\d+)", address)
    if found is not None and "://" not in address:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise NoCluster(
                f"RAY_ADDRESS={address}: nobody answers there ({error}); the head has ended, or the address is one of an earlier job: "
                "set it to the head of this one"
            ) from error
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NoCluster(f"RAY_ADDRESS={address}: {reason}; the token (RAY_AUTH_TOKEN_PATH) and Ray's version must be the head's") from error
