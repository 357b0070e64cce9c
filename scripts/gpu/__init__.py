# SPDX-License-Identifier: Apache-2.0
"""Checks of what only a GPU can show; `scripts/gpu_check.sh` runs them."""
