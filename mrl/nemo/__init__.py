# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's room: its dialect of config keys, and the data of its Nano recipe."""
