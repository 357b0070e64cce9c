# SPDX-License-Identifier: Apache-2.0
"""A random model for a cache, and what processes of the cache tests run: they fork from one with torch imported."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from safetensors.torch import save_file

from conversion import cache, convert
from conversion.convert import convert_hf_to_mcore
from conversion.families.registry import family
from conversion.files.manifest import FinishedFiles, HashedFile
from tests.tiny import TINY_CONFIG as TINY
from tests.waiting import wait_until


def save_model(folder: Path, *, seed: int = 0, **overrides: object) -> Path:
    """Random weights of a tiny nemotron_h."""
    config = {**TINY, **overrides, "torch_dtype": "float32"}
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    tensors = {name: torch.randn(shape) for name, shape in family(config).canonical(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def light_processes() -> ForkServerContext:
    """Processes that start in milliseconds and have what a conversion needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def fill(hf: Path, root: Path, log: Path, *, num_builders: int = 1) -> str:
    """The cached checkpoint of `hf`; each begun conversion is a line of `log`, and waits until so many have begun."""
    # A forked child must not wait for threads that only its parent has.
    torch.set_num_threads(1)

    def build(out: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        wait_until(lambda: len(log.read_text().splitlines()) >= num_builders, f"{num_builders} builders")
        convert_hf_to_mcore(hf, out)

    return str(cache.cached_mcore(hf, root, build=build))


def fill_unseeing(hf: Path, root: Path, log: Path) -> str:
    """`fill` on a file system where nobody ever sees that somebody else is at work."""
    cache._Watch.others_at_work = lambda self, *, besides=None: False
    return fill(hf, root, log, num_builders=2)


def fill_in_files(hf: Path, root: Path, log: Path) -> None:
    """`fill` in files of 64 KB; `log` with the suffix .kept gets a line for each that an earlier attempt finished."""
    convert.MAX_FILE_BYTES = 1 << 16
    written = FinishedFiles.written

    def logged(self: FinishedFiles, path: Path, write: Callable[[HashedFile], object]) -> tuple[object, bool]:
        note, is_kept = written(self, path, write)
        if is_kept:
            with log.with_suffix(".kept").open("a") as file:
                file.write(f"{path.name}\n")
        return note, is_kept

    FinishedFiles.written = logged
    fill(hf, root, log)


def fill_and_die(hf: Path, root: Path, log: Path) -> None:
    """`fill_in_files`, killed by itself before the fourth file, once the records of two stand beside them."""
    written = FinishedFiles.written

    def write_three(self: FinishedFiles, path: Path, write: Callable[[HashedFile], object]) -> tuple[object, bool]:
        found = written(self, path, write)
        while path.name == "__2_0.distcp":
            if len(list(path.parent.glob("*.finished"))) >= 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    FinishedFiles.written = write_three
    fill_in_files(hf, root, log)


def fill_up_to(hf: Path, root: Path, log: Path, last: int | None) -> None:
    """`fill_in_files` killing itself at operation `last` on cache files. Without it, puts their number beside `log`."""
    num_operations = 0
    main_thread = threading.get_ident()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal num_operations
        # The heartbeat's thread works by the clock.
        if threading.get_ident() != main_thread or not event.startswith(("open", "os.", "shutil.")):
            return
        if str(arguments[0]).startswith(str(root)):
            num_operations += 1
            if num_operations == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    fill_in_files(hf, root, log)
    log.with_suffix(".operations").write_text(str(num_operations))


def fill_until(hf: Path, root: Path, error: BaseException) -> None:
    """Ends `fill` by an error, after the conversion and before the entry is published."""
    torch.set_num_threads(1)

    def fail(folder: Path) -> None:
        raise error

    cache.sync_tree = fail
    with suppress(ValueError, type(error)):
        cache.cached_mcore(hf, root)
