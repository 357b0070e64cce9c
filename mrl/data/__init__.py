# SPDX-License-Identifier: Apache-2.0
"""Prompts in, packed batches out. Pure."""
