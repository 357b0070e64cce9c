"""Asks every node of the cluster at RAY_ADDRESS for its facts, and whether it shares folders with this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from conversion.storage.canary import CANARIES, PATIENCE_S, answer_canary, is_answered, release_canary, retire_canary
from mrl.cluster.survey import ask_nodes, clock_offsets, joined_cluster
from mrl.diagnosis.gather import PROBE_TIMEOUT_S, gather
from mrl.diagnosis.nodes import NodeLook, NodeReport

# A node's first task waits for a new process, which imports from a network file system.
ANSWER_TIMEOUT_S = PROBE_TIMEOUT_S + PATIENCE_S + 60.0


def look_around(name: str, folders: Mapping[str, Path], canaries: Mapping[str, Path], patience_s: float, tries_imports: bool) -> NodeLook:
    """What the node called `name` says; runs there. `canaries` are files that the asking host has written, by folder."""
    facts = gather(folders, is_in_cluster=True, tries_imports=tries_imports)
    return NodeLook(facts, {folder: answer_canary(canary, name, patience_s=patience_s) for folder, canary in canaries.items()})


def report_nodes(
    folders: Mapping[str, Path], shared: Sequence[Path], *, tries_imports: bool, patience_s: float = PATIENCE_S
) -> tuple[list[NodeReport], list[str]]:
    """What every node says, and the names of the nodes that have left. All nodes should share the folders `shared`.

    Raises:
        NoCluster: there is no such cluster.
    """
    with released(shared) as canaries, joined_cluster() as nodes:
        alive = [node for node in nodes if node.is_alive]
        replies = ask_nodes(alive, look_around, folders, canaries, patience_s, tries_imports, deadline_s=ANSWER_TIMEOUT_S)
        clocks = clock_offsets([node for node in alive if not replies[node.name].error], deadline_s=ANSWER_TIMEOUT_S)
        reports = []
        for name, reply in replies.items():
            look = reply.answer if isinstance(reply.answer, NodeLook) else None
            sees = look.sees if look is not None else {}
            # A node that could not write has nothing to be seen.
            seen = {folder: is_answered(canaries[folder], name, patience_s=patience_s) for folder, can_see in sees.items() if can_see}
            clock = clocks.get(name)
            reports.append(
                NodeReport(name, look, reply.error, seen)
                if clock is None
                else NodeReport(name, look, reply.error, seen, clock.seconds, clock.uncertainty_s)
            )
        return reports, [node.name for node in nodes if not node.is_alive]


@contextmanager
def released(folders: Sequence[Path]) -> Iterator[dict[str, Path]]:
    """A canary in each of these folders that can be written, by folder, inside the `with` block. Leaves nothing behind."""
    canaries: dict[str, Path] = {}
    made = [path for folder in folders for path in (folder / CANARIES, folder, *folder.parents) if not path.exists()]
    try:
        for folder in folders:
            # A folder that cannot be written is a finding of its own, among the disks.
            with suppress(OSError):
                canaries[str(folder)] = release_canary(folder)
        yield canaries
    finally:
        for canary in canaries.values():
            retire_canary(canary)
        for path in made:
            with suppress(OSError):  # somebody else uses it by now
                path.rmdir()
