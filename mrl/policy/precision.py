"""How exactly this process's libraries multiply float32. TF32 keeps 10 of 23 mantissa bits, and a library may use it unasked."""

from __future__ import annotations

import torch

from mrl.policy import compat


@torch.no_grad()
def float32_products() -> dict[str, str]:
    """By library: "float32" or "TF32", measured on this rank's device. Not collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    # 15 bits: more than TF32 keeps, fewer than float32 does.
    values, identity = torch.full((256, 256), 1 + 2.0**-15, device=device), torch.eye(256, device=device)
    products = {"torch": values @ identity}
    if compat.HAVE_TE:
        from transformer_engine.pytorch import Linear

        layer = Linear(256, 256, bias=False, params_dtype=torch.float32, device=device)
        layer.weight.copy_(identity)
        products["Transformer Engine"] = layer(values)
    return {library: "float32" if torch.equal(product, values) else "TF32" for library, product in products.items()}
