# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.unit.refit.kernel_compile`: compiles kernels to machine code of two GPU generations, names these."""

from __future__ import annotations

from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mrl.refit import triton_kernels as kernels
from mrl.refit.device_checksum import BLOCK_WORDS

TABLES = {
    "table": "*i64",
    "row_of_tile": "*i32",
    "WORD_BYTES": "constexpr",
    "IS_RUN": "constexpr",
    "ELEMENTS": "constexpr",
}
COPY = (TABLES, {"ELEMENTS": kernels._COPY_ELEMENTS}, kernels._COPY_WARPS)
SUM = (
    {**TABLES, "inner": "*i64", "outer": "*i64", "sums": "*i64", "BLOCK": "constexpr", "BLOCKS": "constexpr"},
    {"BLOCK": BLOCK_WORDS, "BLOCKS": kernels._SUM_BLOCKS, "ELEMENTS": kernels._SUM_ELEMENTS},
    kernels._SUM_WARPS,
)
KINDS = {kernels._copy_kernel: (COPY, kernels._WORD_BYTES), kernels._sum_kernel: (SUM, (128, 16, 4, 1))}

if __name__ == "__main__":
    for capability in (90, 100):
        for kernel, ((signature, constants, num_warps), sizes) in KINDS.items():
            for word_bytes, is_run in product(sizes, (False, True)):
                constants = {**constants, "WORD_BYTES": word_bytes, "IS_RUN": is_run}
                source = ASTSource(kernel, signature, constexprs=constants)
                compiled = triton.compile(
                    source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
                )
                assert compiled.asm["cubin"]
        print(f"sm_{capability}")
