# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels a float32 engine runs on a GPU leave tl.dot's precision to the environment (FULL_FLOAT32)."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

KERNELS = [
    "model_executor/layers/fused_moe/fused_moe.py",
    "model_executor/layers/mamba/ops/ssd_bmm.py",
    "model_executor/layers/mamba/ops/ssd_chunk_scan.py",
    "model_executor/layers/mamba/ops/ssd_chunk_state.py",
    # vLLM's other backends of attention know no float32.
    "v1/attention/ops/triton_unified_attention.py",
]


@pytest.mark.parametrize("name", KERNELS)
def test_no_product_names_a_precision(name: str):
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / name).read_text(encoding="utf-8"))
    products = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"]
    assert products
    for product in products:
        named = {keyword.arg for keyword in product.keywords}
        # The precision would come fourth, behind the sum.
        assert len(product.args) <= 3 and not named & {"input_precision", "allow_tf32"}, f"{name}:{product.lineno}"
