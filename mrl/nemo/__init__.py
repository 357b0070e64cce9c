# SPDX-License-Identifier: Apache-2.0
"""NeMo's room: NeMo RL's dialect of config keys, NeMo Gym's rows, graders and servers, and the Nano recipe's data."""
