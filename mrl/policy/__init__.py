# SPDX-License-Identifier: Apache-2.0
"""Megatron policy ranks. The only folder that imports megatron."""
