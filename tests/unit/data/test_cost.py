import json
from pathlib import Path

import pytest

from mrl.data.cost import SequenceCost, cost_of_model, sequence_cost
from tests.sources import ROOT

QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
    "intermediate_size": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": False,
    "norm_topk_prob": True, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_mixture_by_hand(is_tied: bool):
    cost = cost_of_model(QWEN | {"tie_word_embeddings": is_tied})
    attention = 8 * 24 + 2 * 8 * 12 + 24 * 8  # query, key and value, output
    experts = 10 * 8 + 2 * (3 * 8 * 5)  # router, gate, up and down of two experts
    # The output layer multiplies, whether it is the embedding or not; the embedding itself does not.
    assert cost == SequenceCost(per_token=2.0 * (3 * (attention + experts) + 100 * 8), per_token_squared=2.0 * 3 * 24)
    assert cost.of(10) == 10 * cost.per_token + 100 * cost.per_token_squared


def test_mamba_layers_have_no_quadratic_term():
    models = ROOT / "scripts" / "bench" / "models"
    hybrid, decoder = (
        cost_of_model(json.loads((models / f"{name}.config.json").read_text())) for name in ("nemotron3_nano_30b_a3b", "qwen3_30b_a3b")
    )
    # 3.2 and 3.0 billion parameters at work per token, as the model cards say without embeddings; 6 of 52 layers attend, and 48 of 48.
    assert hybrid.per_token / 2e9 == pytest.approx(3.2, abs=0.05)
    assert decoder.per_token / 2e9 == pytest.approx(3.0, abs=0.05)
    assert (hybrid.per_token_squared, decoder.per_token_squared) == (2 * 6 * 32 * 128, 2 * 48 * 32 * 128)


def test_the_model_is_named_by_its_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert sequence_cost(str(tmp_path)) == cost_of_model(QWEN)
