# SPDX-License-Identifier: Apache-2.0
"""Attempts of a real run as child processes, killed at chosen points, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

ATTEMPT_TIMEOUT_S = 3 * HANG_S


@dataclass
class Attempt:
    """One `python -m mrl.train`, or another `program` in its place."""

    run_folder: Path
    overrides: list[str]
    log: Path
    config: str = "grpo_tiny.yaml"
    working_folder: Path = ROOT
    program: Sequence[str] = ("-m", "mrl.train")
    process: subprocess.Popen = field(init=False)

    def __enter__(self) -> Attempt:
        command = [sys.executable, *self.program, self.config, *self.overrides]
        # A mark that every process of this attempt inherits, so that leftovers can be told from everything else.
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MRL_TEST_ATTEMPT": self.mark}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.working_folder,
                process_group=0,
                # A shell's background jobs, pytest perhaps among them, ignore Ctrl-C, and their children do.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=HANG_S)

    @property
    def mark(self) -> str:
        return f"{self.run_folder}-{self.log.name}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def is_over() -> bool:
            holds = condition()
            assert holds or self.process.poll() is None, f"the attempt ended before {what}:\n{self.text()[-4000:]}"
            return holds

        # Tiny checkpoints are written in milliseconds.
        wait_until(is_over, what, ATTEMPT_TIMEOUT_S, explain=lambda: self.text()[-4000:], longest_pause_s=0.002)

    def send(self, number: signal.Signals, target: str) -> None:
        """Sends a signal to the `driver`, to its process `group`, or to `every process`."""
        if target == "group":
            os.killpg(self.process.pid, number)
        for pid in {"driver": [self.process.pid], "every process": self.processes()}.get(target, []):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def finish(self) -> int:
        return self.process.wait(timeout=ATTEMPT_TIMEOUT_S)

    def actor_pid(self, actor: str) -> int:
        """Process of an actor ("policy-rank-0", "engine-0") of the newest attempt, by the first line of its log."""
        folder = max((self.run_folder / "logs").glob("exp_*"))
        found = re.findall(r"process (\d+)", (folder / "actors" / f"{actor}.log").read_text())
        return int(found[-1])

    def processes(self) -> list[int]:
        """Processes of this attempt that are alive (zombies that nobody reaps are not)."""
        alive = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if f"MRL_TEST_ATTEMPT={self.mark}".encode() in environment.split(b"\0") and state != "Z":
                alive.append(int(entry.name))
        return alive

    def assert_nothing_survives(self) -> None:
        def shared_memory() -> list[Path]:
            return [path for path in Path("/dev/shm").iterdir() if "mrl" in path.name]

        def leftovers() -> str:
            found = {
                pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:120] for pid in self.processes()
            }
            return f"{found} {shared_memory()}\n{self.text()[-4000:]}"

        # Other runs on this host have such files for moments.
        wait_until(
            lambda: not (self.processes() or shared_memory()), f"end of all processes of {self.mark}", explain=leftovers
        )


@dataclass(frozen=True)
class Runs:
    """Runs of the packaged config on a warm-started model, whose rewards differ in a group: each step has gradients."""

    folder: Path
    settings: list[str]

    def attempt(self, run: str, log: str) -> Attempt:
        """One more attempt of a run."""
        keys = [*tiny_inputs(), *self.settings, f"checkpointing.checkpoint_dir={self.folder / run}"]
        return Attempt(self.folder / run, keys, self.folder / f"{run}-{log}.log")

    def unbroken(self) -> Path:
        """The run folder of a run that nobody disturbs."""
        with self.attempt("unbroken", "only") as only:
            assert only.finish() == 0, only.text()
        return only.run_folder


def tiny_inputs(prepared: Path = ROOT / "prepared" / "tiny") -> list[str]:
    """Overrides with the model and the data that `python -m mrl.prepare tiny` makes."""
    from mrl.recipes.tiny import prepare_tiny

    prepare_tiny(prepared, seed=0)
    return [
        f"policy.model_name={prepared / 'model'}",
        f"data.train.data_path={prepared / 'data' / 'train.jsonl'}",
        f"data.validation.data_path={prepared / 'data' / 'validation.jsonl'}",
    ]


def ledger(run_folder: Path) -> list[dict]:
    path = run_folder / "ledger.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def is_taken(run_folder: Path, step: int) -> bool:
    """True when step `step` is being generated."""
    return bool(events := ledger(run_folder)) and events[-1]["event"] == "taken" and events[-1]["step"] == step


def is_trained(run_folder: Path, step: int) -> bool:
    """True when step `step` has been trained and the next one not begun: refit, or checkpoint."""
    return bool(events := ledger(run_folder)) and events[-1]["event"] == "trained" and events[-1]["step"] == step


def is_writing(run_folder: Path, step: int) -> bool:
    """True when ranks write their files of the checkpoint of `step` in the background; its metadata come after all."""
    # Walks on when the folder gets its final name meanwhile.
    names = [name for _, _, files in os.walk(run_folder / f"tmp_step_{step}") for name in files]
    return any(name.endswith(".distcp") for name in names) and ".metadata" not in names


def lineage(run_folder: Path) -> dict[int, list]:
    """Step -> prompts, of the steps the surviving weights were trained on, by an independent replay of the ledger."""
    trained: dict[int, list] = {}
    taken: list = []
    for event in ledger(run_folder):
        if event["event"] == "taken":
            taken += event["prompts"]
        elif event["event"] == "trained":
            assert event["step"] not in trained, f"step {event['step']} trained twice in one lineage"
            for prompt in event["prompts"] + event.get("dropped", []):
                taken.remove(prompt)
            trained[event["step"]] = event["prompts"]
        elif event["event"] == "rolled_back":
            trained, taken = {step: prompts for step, prompts in trained.items() if step <= event["to_step"]}, []
    return trained
