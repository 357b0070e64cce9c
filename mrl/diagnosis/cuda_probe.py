"""`python -m mrl.diagnosis.cuda_probe`: tries torch on every GPU and writes a `CudaProbe` as JSON.

A process of its own, because a driver may hang.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence

from mrl.diagnosis.facts import CudaProbe


def probe() -> CudaProbe:
    """What torch can do with the GPUs that it sees."""
    try:
        import torch
        from torch.cuda import nccl as torch_nccl
    except (ImportError, OSError) as error:
        return CudaProbe(f"torch cannot be imported: {' '.join(str(error).split())}")
    if not torch.cuda.is_available():
        return CudaProbe("torch.cuda.is_available() is False")
    num_gpus = torch.cuda.device_count()
    nccl = ".".join(map(str, torch_nccl.version()))
    capabilities = {torch.cuda.get_device_capability(index) for index in range(num_gpus)}
    built_for = torch.cuda.get_arch_list()
    unsupported = tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities) if not runs_on((major, minor), built_for))
    try:
        for index in range(num_gpus):
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if float((ones @ ones).sum()) != 64.0**3:
                return CudaProbe(f"a product on GPU {index} is wrong", num_gpus, nccl, unsupported)
    except RuntimeError as error:
        return CudaProbe(str(error).splitlines()[0], num_gpus, nccl, unsupported)
    return CudaProbe("", num_gpus, nccl, unsupported)


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a GPU runs code built for these architectures, as torch names them (`sm_90`, `sm_90a`, `compute_120`).

    Machine code runs on its own major version from its minor version on, PTX (`compute_...`) on everything later; with a letter behind
    it, both run on that version alone (CUDA C++ Programming Guide, "Application Compatibility").
    """
    for kind, digits, letter in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(built_for)):
        built = int(digits[:-1]), int(digits[-1])
        is_of_family = kind == "compute" or built[0] == capability[0]
        if built == capability or (not letter and is_of_family and built <= capability):
            return True
    return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(probe())) + "\n")
