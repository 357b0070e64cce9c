# SPDX-License-Identifier: Apache-2.0
"""Rollouts that outlive an attempt: between the sampling collector and `mrl.store.kept` that writes and reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mrl.loop.run import is_save_step
from mrl.store.kept import KEPT, KeptRollouts, WholeGroup, conditions_of, drop_kept, with_payloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mrl.cluster.rollouts import AskedGroup, RolloutCollector
    from mrl.config.schema.run import RunConfig
    from mrl.store.identity import Identity
    from mrl.store.run_folder import RunFolder
    from mrl.types import Prompt, Rollout, RolloutInfo

Revive = Callable[[int, "Prompt"], "AskedGroup | None"]
"""The group of an (epoch, prompt) that an earlier attempt has sampled; None if there is none."""


@contextmanager
def open_kept(
    config: RunConfig, folder: RunFolder, identity: Identity, collector: RolloutCollector, *, last_step: int
) -> Iterator[KeptRollouts | None]:
    """Keeps a run's rollouts in the `with` block; None where checkpointing.keep_rollouts_gb=0, or nothing is saved."""
    section = config.checkpointing
    if not section.enabled or not section.keep_rollouts_gb:
        drop_kept(folder.path / KEPT)
        yield None
        return
    from mrl.cluster.payload import pull_unless

    is_over = threading.Event()

    def pull(infos: Sequence[RolloutInfo]) -> list[Rollout]:
        return pull_unless(is_over, infos)

    kept = KeptRollouts(
        folder.path / KEPT,
        conditions_of(config, identity),
        lag=config.rollouts.async_grpo.max_lag_steps,
        limit_bytes=section.keep_rollouts_gb * 1e9,
        saves=lambda step: is_save_step(section, step) or step == last_step,
        pull=pull,
        check_owner=folder.check_owner,
    )

    def note(group: AskedGroup) -> None:
        if group.epoch >= 0:  # validation has another
            whole = group.judged()
            kept.note(WholeGroup(group.key, group.prompt, group.oldest_version, whole.rollouts, whole.verdicts))

    collector.on_whole = note
    try:
        yield kept
    finally:
        is_over.set()
        kept.close()


def reviver(kept: KeptRollouts | None) -> Revive:
    """Gives the groups that an earlier attempt has kept, each as if it had just been sampled and judged."""

    def revive(epoch: int, prompt: Prompt) -> AskedGroup | None:
        group = kept.take(epoch, prompt) if kept is not None else None
        if kept is None or group is None:
            return None
        from mrl.cluster.payload import put_items
        from mrl.cluster.rollouts import AskedGroup

        version, payloads = kept.version_of(group), iter(put_items(group.rollouts))
        asked = AskedGroup(epoch, prompt, len(group.infos), version, is_kept=True)
        for index, info in enumerate(group.infos):
            asked.infos[index] = replace(
                with_payloads(info, [next(payloads) for _ in info.sequences]), weight_version=version
            )
        asked.verdicts = dict(enumerate(group.verdicts))
        return asked

    return revive
