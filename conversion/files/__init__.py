"""Files of weights: the formats safetensors and torch_dist, checksums, and folders that survive crashes and races."""
