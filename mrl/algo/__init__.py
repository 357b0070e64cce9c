# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses, KL. Pure torch functions."""
