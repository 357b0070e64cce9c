# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests of this folder, all in the pytest process, one alive at a time."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from conversion.adapters import HeldAdapters
from mrl.cluster.environment import importing
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from mrl.rollout.environment import engine_environment
from tests import models
from tests.rollouts import MAX_MODEL_LEN, StartEngine

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

# Before anything imports vLLM.
os.environ.update(engine_environment(has_gpu=False))

# torch may have been imported already, and then does not look at OMP_NUM_THREADS any more. vLLM forbids this call
# later.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Gives the folder of the tiny checkpoint with a seed."""
    folders: dict[int, Path] = {}

    def folder(seed: int) -> Path:
        if seed not in folders:
            folders[seed] = models.save_nemotron_h(tmp_path_factory.mktemp("model"), seed)
        return folders[seed]

    return folder


@contextmanager
def no_collections() -> Iterator[None]:
    """Keeps vLLM from collecting all garbage eight times an engine: most of a start's time, with all imports here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collect", "freeze", "unfreeze"):
            patch.setattr(gc, name, lambda *_: 0)
        yield


@pytest.fixture(scope="module")
def start_engine(checkpoint: Callable[[int], Path]) -> Iterator[StartEngine]:
    """Starts an engine on a folder, or on the checkpoint with a seed; ends the one before it.

    `cache_blocks`: number of blocks of the cache, and tokens of each.
    """
    alive: list[Engine] = []

    def stop() -> None:
        with no_collections():
            while alive:
                alive.pop().shutdown()
        gc.collect()
        gc.freeze()

    def start(
        model: int | Path = 0,
        *,
        keeps_routes: bool = False,
        keeps_kv_cache: bool = False,
        tokenizer: Path | None = None,
        num_tokens: int = 0,
        speculation: Mapping[str, object] | None = None,
        quantization: str | None = None,
        adapters: HeldAdapters | None = None,
        cache_blocks: tuple[int, int] | None = None,
        **vllm_cfg: int | str,
    ) -> Engine:
        with nullcontext() if "mrl.rollout.engine" in sys.modules else importing():
            from mrl.rollout.engine import Engine

        stop()
        limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, "max_num_batched_tokens": 2048} | vllm_cfg
        settings = dataclasses.replace(VllmConfig(precision="float32", enforce_eager=True), **limits)
        folder = checkpoint(model) if isinstance(model, int) else model
        kwargs: dict[str, object] = {} if speculation is None else {"speculative_config": dict(speculation)}
        kwargs |= {} if quantization is None else {"quantization": quantization}
        if cache_blocks is not None:
            kwargs |= dict(zip(("num_gpu_blocks_override", "block_size"), cache_blocks, strict=True))
        generation = GenerationConfig(max_new_tokens=16, vllm_cfg=settings, vllm_kwargs=kwargs)
        with no_collections():
            engine = Engine(
                str(folder),
                generation,
                seed=1,
                worker_timeout_s=300.0,
                keeps_routes=keeps_routes,
                keeps_kv_cache=keeps_kv_cache,
                tokenizer=None if tokenizer is None else str(tokenizer),
                num_tokens=num_tokens,
                adapters=adapters,
            )
        alive.append(engine)
        return alive[0]

    yield start
    stop()
