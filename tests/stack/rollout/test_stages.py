# SPDX-License-Identifier: Apache-2.0
"""An engine of two pipeline stages: the bits of one process, refits of both stages, also between passes that are under way."""

from __future__ import annotations

from pathlib import Path

from mrl.config.model import sizes_of
from mrl.plan.engine import cache_layout
from mrl.refit.checksum import digest
from tests import models
from tests.rollouts import StartEngine, differences, random_requests, run
from tests.stack.rollout.test_plan import CPU_BLOCK
from tests.stack.rollout.trainer import Trainer, expected_tensors, refit
from tests.stack.rollout.witness import PP2

REQUESTS = random_requests(12)
# Prompts are cut into chunks, and several passes are under way.
CHUNK_TOKENS = 128


def test_an_engine_of_two_stages_draws_what_one_process_draws(start_engine: StartEngine, tmp_path: Path) -> None:
    loaded, other = (models.save_model(tmp_path / str(seed), "qwen3", seed) for seed in range(2))
    alone = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS)
    from vllm.v1.engine.core_client import InprocClient

    trainer = Trainer(loaded)
    alone.enter("load")
    alone.prepare_refit(trainer.workers())
    refit(alone, trainer, version=1)
    expected = {1: run(alone, REQUESTS)}
    trainer.load(other)
    refit(alone, trainer, version=2)
    expected[2] = run(alone, REQUESTS)

    engine = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS, pipeline_parallel_size=2)
    layout = cache_layout(sizes_of(trainer.inputs.hf_config), 1, element_bytes=4, kernel_block=CPU_BLOCK, pp=2)
    assert engine.llm.vllm_config.cache_config.num_gpu_blocks == (64 << 20) // layout.block_bytes
    engine.enter("load")
    before, trainer = engine.live_digest(), Trainer(loaded, PP2)
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before == [digest(expected_tensors(loaded, PP2, worker)) for worker in range(2)]
    assert differences(run(engine, REQUESTS), expected[1]) == []

    # Dropped while passes are under way; a second time the next weights come.
    for _ in range(2):
        engine.add(REQUESTS)
        for _ in range(6):
            engine.step()
        assert isinstance(engine.llm.engine_core, InprocClient)
        assert engine.llm.engine_core.engine_core.batch_queue and engine.num_unfinished == len(REQUESTS)
        if engine.weight_version == 1:
            engine.abort(engine.unfinished_ids[::2])
            trainer.load(other)
            refit(engine, trainer, version=2)
            mixed = run(engine, ())
            assert len(mixed) == len(REQUESTS) // 2
            assert {rollout.num_weight_versions for rollout in mixed.values()} == {2}
            assert all(rollout.token_ids[0] == expected[1][key].token_ids[0] for key, rollout in mixed.items())
        else:
            engine.abort(engine.unfinished_ids)
    assert engine.live_digest() == [digest(expected_tensors(other, PP2, worker)) for worker in range(2)]
    assert differences(run(engine, REQUESTS), expected[2]) == []
