# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.unit.refit.kernel_compile`: compiles the kernels to machine code of two generations of GPUs, and names these."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mrl.refit import triton_kernels as kernels
from mrl.refit.device_checksum import BLOCK_WORDS

TABLES = {"table": "*i64", "row_of_tile": "*i32"}
COPY = ({**TABLES, "BLOCK": "constexpr"}, {"BLOCK": kernels._COPY_WORDS}, kernels._COPY_WARPS)
SUM = (
    {**TABLES, "inner": "*i64", "outer": "*i64", "sums": "*i64", "BLOCK": "constexpr", "STEP": "constexpr"},
    {"BLOCK": BLOCK_WORDS, "STEP": kernels._STEP_WORDS},
    kernels._SUM_WARPS,
)

if __name__ == "__main__":
    for capability in (90, 100):
        for kernel, (signature, constants, num_warps) in ((kernels._copy_kernel, COPY), (kernels._sum_kernel, SUM)):
            source = ASTSource(kernel, signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
            assert compiled.asm["cubin"]
        print(f"sm_{capability}")
