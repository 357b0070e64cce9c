"""`python -m mrl.diagnosis.cuda_probe`: tries torch on every GPU and writes a `CudaProbe` as JSON.

A process of its own, because a driver may hang.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

from mrl.diagnosis.facts import CudaProbe


def probe() -> CudaProbe:
    """What torch can do with the GPUs that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return CudaProbe(f"torch cannot be imported: {' '.join(str(error).split())}")
    if not torch.cuda.is_available():
        return CudaProbe("torch.cuda.is_available() is False")
    num_gpus = torch.cuda.device_count()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    capabilities = {torch.cuda.get_device_capability(index) for index in range(num_gpus)}
    # Code for a capability runs on others of the same major version; capabilities are written as `sm_90`, `sm_120`, `sm_90a`.
    majors = {int(digits[:-1]) for digits in re.findall(r"_(\d+)", " ".join(torch.cuda.get_arch_list()))}
    unsupported = tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities) if major not in majors)
    try:
        for index in range(num_gpus):
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if float((ones @ ones).sum()) != 64.0**3:
                return CudaProbe(f"a product on GPU {index} is wrong", num_gpus, nccl, unsupported)
    except RuntimeError as error:
        return CudaProbe(str(error).splitlines()[0], num_gpus, nccl, unsupported)
    return CudaProbe("", num_gpus, nccl, unsupported)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(probe())) + "\n")
