# SPDX-License-Identifier: Apache-2.0
"""The shared cache at start-up, with real Ray actors: a node not sharing it is named, a damaged entry is made again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from conversion.cache import CacheEntry, check_entry, mcore_in_use, read_entry
from conversion.families.common import MegatronParallel
from conversion.files.owners import answer_canary
from mrl.cluster.policies import check_shared, repair_unless
from mrl.cluster.runtime import ray_runtime
from mrl.config.load import load_config
from tests import models
from tests.waiting import HANG_S


class Node:
    """An actor of a node on which the driver's path `root` leads to the folder `view`."""

    def move(self, root: Path, view: Path, *, is_mirror: bool = False) -> None:
        """Moves the cache; of a mirror the folder is a copy of the driver's, not the same one."""
        self.root = root
        self.view = view
        self.is_mirror = is_mirror

    def answer_canary(self, canary: Path, answer: str, patience_s: float) -> tuple[str, bool]:
        if self.is_mirror:
            shutil.copytree(self.root, self.view)
        return self.view.name, answer_canary(self.view / canary.relative_to(self.root), answer, patience_s=patience_s)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list]:
    with ray_runtime(load_config("grpo_tiny.yaml", [])):
        yield [ray.remote(Node).options(num_cpus=0).remote() for _ in range(2)]


def test_nodes_that_share_the_cache_pass_and_leave_nothing(nodes: list, tmp_path: Path):
    root = tmp_path / "cache"
    for node in nodes:
        ray.get(node.move.remote(root, root), timeout=HANG_S)
    check_shared(root, nodes, deadline_s=HANG_S)
    assert [path for path in root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("is_mirror", "reason"),
    [(False, "node other cannot see"), (True, "the node of the driver cannot see what node other wrote")],
)
def test_a_node_that_does_not_share_the_cache_is_named(nodes: list, tmp_path: Path, is_mirror: bool, reason: str):
    root = tmp_path / "cache"
    ray.get(
        [nodes[0].move.remote(root, root), nodes[1].move.remote(root, tmp_path / "other", is_mirror=is_mirror)],
        timeout=HANG_S,
    )
    with pytest.raises(
        RuntimeError,
        match=f"{root}: this cache is not shared: {reason}.*set MRL_CACHE to a folder that all nodes share",
    ):
        check_shared(root, nodes, deadline_s=HANG_S, patience_s=0.5)


def test_a_damaged_entry_is_converted_again_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = models.save_nemotron_h(tmp_path / "model")
    parallel = MegatronParallel(tp=2)
    with mcore_in_use(model, tmp_path / "cache", parallel=parallel) as cached:
        data, _ = sorted(cached.rglob("*.distcp"))
        content = data.read_bytes()
        data.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
        with caplog.at_level(logging.WARNING):
            repair_unless(check_entry, model, cached, parallel)
        assert data.name in caplog.text
        check_entry(cached)
    parallel = MegatronParallel()
    with (
        mcore_in_use(model, tmp_path / "cache", parallel=parallel) as cached,
        pytest.raises(ValueError, match="always"),
    ):
        repair_unless(refuse, model, cached, parallel)


def test_of_two_runs_that_find_the_same_damage_one_repairs_it(tmp_path: Path):
    model, parallel = models.save_nemotron_h(tmp_path / "model"), MegatronParallel()
    with mcore_in_use(model, tmp_path / "cache", parallel=parallel) as cached:
        (cached / "manifest.json").write_text("damaged")
        repaired: list[CacheEntry | None] = []

        def check_while_another_repairs(folder: Path) -> None:
            try:
                check_entry(folder)
            finally:
                if not repaired:
                    repair_unless(check_entry, model, cached, parallel)
                    repaired.append(read_entry(folder.parent))

        repair_unless(check_while_another_repairs, model, cached, parallel)
        assert [read_entry(cached.parent)] == repaired
        check_entry(cached)


def refuse(folder: Path) -> None:
    raise ValueError("always")
