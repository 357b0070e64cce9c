# SPDX-License-Identifier: Apache-2.0
"""What a run needs of memory, bytes and time, from its config and config.json alone. Imports no torch, Ray, vLLM or Megatron."""
