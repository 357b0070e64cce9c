# SPDX-License-Identifier: Apache-2.0
"""`policy.hf_config_overrides`: Megatron and vLLM give transformers' logprobs with the same overrides, here YaRN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mrl.config.model import overridden_folder
from tests import models
from tests.parity import Parity, hf_scores
from tests.rollouts import StartEngine, random_requests, run
from tests.stack.policy import layout_ranks
from tests.stack.ranks import RankPool

YARN: dict[str, object] = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=4.0,
    original_max_position_embeddings=64,
    truncate=True,
    beta_fast=32,
    beta_slow=1,
)
SCALINGS: dict[str, dict[str, object]] = {
    "as NeMo RL's recipes": YARN | dict(mscale=1, mscale_all_dim=0),
    "magnitudes": YARN | dict(mscale=1.3, mscale_all_dim=0.7, factor=2.5, truncate=False),
}


@pytest.fixture(scope="module", params=SCALINGS)
def scaling(request: pytest.FixtureRequest) -> dict[str, object]:
    return SCALINGS[request.param]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model(tmp_path_factory.mktemp("plain"), "qwen3", 0, pad_token_id=None)


@pytest.fixture(scope="module")
def folder(plain: Path, scaling: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overridden_folder(plain, {"rope_scaling": scaling}, beside=tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def transformers_model(plain: Path, scaling: dict[str, object]) -> PreTrainedModel:
    """transformers' model of the plain folder, told of the scaling in its own way."""
    config = AutoConfig.from_pretrained(plain)
    config.rope_parameters = dict(scaling)
    return AutoModelForCausalLM.from_pretrained(plain, config=config).float().eval()


def test_megatron_s_logprobs(ranks: RankPool, folder: Path, plain: Path, transformers_model: PreTrainedModel):
    rng = np.random.default_rng(3)
    sequences = [[int(token) for token in rng.integers(0, 256, length)] for length in (240, 130, 17, 2)]

    def logprobs(model: Path) -> list[np.ndarray]:
        (row,) = ranks.run(layout_ranks.logprobs, layout_ranks.policy_config(), model, [sequences], world_size=1)[-1]
        ends = np.cumsum([len(sequence) for sequence in sequences])
        return [row[end - len(sequence) : end - 1] for sequence, end in zip(sequences, ends, strict=True)]

    parity, parity_without = Parity(), Parity()
    for sequence, scaled, unscaled in zip(sequences, logprobs(folder), logprobs(plain), strict=True):
        scores = hf_scores(transformers_model, sequence[:1], sequence[1:])
        parity.add(scaled, scores)
        parity_without.add(unscaled, scores)
    parity.check(min_tokens=300)
    assert parity_without.num_wrong > 300, "the scaling must matter"


def test_vllm_s_logprobs(start_engine: StartEngine, folder: Path, transformers_model: PreTrainedModel):
    engine = start_engine(folder)
    engine.set_weight_version(0)
    parity = Parity()
    for rollout in run(engine, random_requests(16, max_new_tokens=40)).values():
        parity.add(
            rollout.generator_logprobs,
            hf_scores(transformers_model, rollout.request.token_ids, rollout.token_ids.tolist()),
        )
    parity.check(min_tokens=300)
