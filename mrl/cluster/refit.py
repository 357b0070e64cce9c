"""Refit, driven: settle, exchange, pull, verify, version. The schedule is built once; every step repeats it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from conversion.families.registry import family
from conversion.families.common import VllmParallel
from conversion.reshard import Schedule, reshard
from mrl.cluster.engine_group import EngineGroup, index_of
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.waiting import ActorLost
from mrl.config.schema import PolicyConfig
from mrl.refit.pull import VerifyReport
from mrl.refit.zero import compare_digests

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefitReport:
    """One refit of all engines, summed over them."""

    seconds: float
    verified_bytes: int
    copied_bytes: int
    weight_version: int
