# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's dialect: what becomes of its keys here."""
