# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.unit.cluster.dot_compile`: TF32 instructions in Triton float32 products on three GPU generations."""

from __future__ import annotations

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def _multiply(left, right, product, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(product + places, tl.dot(tl.load(left + places), tl.load(right + places)))


if __name__ == "__main__":
    for capability in (80, 90, 100):
        source = ASTSource(
            _multiply,
            {**dict.fromkeys(("left", "right", "product"), "*fp32"), "SIZE": "constexpr"},
            constexprs={"SIZE": 64},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(len(re.findall(r"mma.*tf32", compiled.asm["ptx"])))
