"""Where the policy ranks read their starting weights: the cache of converted models, filled on first use, which all nodes must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from conversion.cache import cached_mcore, discard, mcore_in_use, read_entry, root_of
from conversion.families.common import MegatronParallel
from conversion.files.canary import PATIENCE_S, is_answered, release_canary, retire_canary
from mrl import env
from mrl.cluster.waiting import wait_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingWeights:
    """The model folder, and its checkpoint in the cache, None where the cache is off."""

    hf: Path
    parallel: MegatronParallel
    cached: Path | None = None

    def repair_unless(self, check: Callable[[Path], None]) -> None:
        """Returns when `check` finds nothing wrong with the cached checkpoint, converted once more if it did.

        Raises:
            ValueError: the new one is damaged too.
        """
        assert self.cached is not None
        seen = read_entry(self.cached.parent)
        try:
            check(self.cached)
        except ValueError as error:
            logger.warning("The cached model is damaged and is converted again: %s", error)
            discard(self.cached, seen)
            cached_mcore(self.hf, root_of(self.cached), parallel=self.parallel)
            check(self.cached)


@contextmanager
def starting_weights(hf: Path, root: Path | None, parallel: MegatronParallel) -> Iterator[StartingWeights]:
    """The weights of a model folder, in the cache at `root` if there is one; its entry stays while the `with` block runs."""
    if root is None:
        yield StartingWeights(hf, parallel)
        return
    # Cut for the ranks of this run: each checks and reads a file of its own.
    with mcore_in_use(hf, root, parallel=parallel) as cached:
        yield StartingWeights(hf, parallel, cached)


def check_shared(root: Path, actors: list, *, deadline_s: float, patience_s: float = PATIENCE_S) -> None:
    """Returns if every actor (with a method as `PolicyActor.answer_canary`) and this process see each other's new files in `root`.

    Raises:
        RuntimeError: names the node that does not.
    """
    canary = release_canary(root)
    try:
        pending = {f"{index}": actor.answer_canary.remote(canary, f"{index}", patience_s) for index, actor in enumerate(actors)}
        answers = cast(dict[str, tuple[str, bool]], wait_all(pending, deadline_s=deadline_s + patience_s, what="look at the shared cache"))
        for name, (node, has_found) in answers.items():
            if not has_found:
                raise RuntimeError(_not_shared(root, f"node {node} cannot see {canary}, or cannot write beside it"))
            if not is_answered(canary, name, patience_s=patience_s):
                raise RuntimeError(_not_shared(root, f"the node of the driver cannot see what node {node} wrote beside {canary}"))
    finally:
        retire_canary(canary)


def _not_shared(root: Path, reason: str) -> str:
    return (
        f"{root}: this cache is not shared: {reason}; set {env.MRL_CACHE.name} to a folder that all nodes share, "
        f"or {env.MRL_CACHE.name}=off to read the Hugging Face files directly"
    )
