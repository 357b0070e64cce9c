# SPDX-License-Identifier: Apache-2.0
"""Rewards and environments."""
