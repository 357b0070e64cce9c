# SPDX-License-Identifier: Apache-2.0
"""Predicts a run's memory, bytes and time from config and config.json alone. Needs no torch, Ray, vLLM or Megatron."""
