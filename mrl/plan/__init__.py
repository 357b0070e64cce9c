# SPDX-License-Identifier: Apache-2.0
"""Prediction of a run's memory, bytes and time, from its config and config.json alone. Imports no torch, Ray, vLLM or Megatron."""
