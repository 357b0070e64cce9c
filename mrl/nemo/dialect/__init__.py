# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's dialect: how its keys are read here."""
