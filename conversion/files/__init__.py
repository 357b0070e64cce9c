# SPDX-License-Identifier: Apache-2.0
"""Files of weights: the formats safetensors and torch_dist, checksums, and folders that survive crashes and races."""
