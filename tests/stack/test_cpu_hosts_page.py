# SPDX-License-Identifier: Apache-2.0
"""docs/cpu_hosts.md names everything that CPU hosts replace, and nothing else."""

from __future__ import annotations

import re

from tests.sources import ROOT
from tests.stack.ranks import Rank, RankPool


def replaced_for_megatron(rank: Rank) -> list[str]:
    from mrl.policy import cpu

    cpu.install()
    return list(cpu.REPLACED)


def test_the_page_names_what_is_replaced(ranks: RankPool):
    from mrl.rollout.cpu import REPLACED

    (for_megatron,) = ranks.run(replaced_for_megatron, world_size=1)
    replaced = {".".join(name.split()[0].split(".")[-2:]) for name in [*for_megatron, *REPLACED]}
    # Its table has the names of megatron-core 0.16.1, and a sentence those of newer ones.
    replaced = {name.replace("hybrid_block.", "mamba_block.") for name in replaced} - {"random._get_share_storage"}
    if "common.HAVE_FLA" in replaced:
        replaced = replaced - {"common.HAVE_FLA", "gdn.chunk_gated_delta_rule"} | {"gated_delta_net.HAVE_FLA"}
    rows = [line for line in (ROOT / "docs" / "cpu_hosts.md").read_text().splitlines() if line.startswith("| ")]
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[3])} == replaced
