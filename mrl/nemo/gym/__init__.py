# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym: rules of its section, its rows as conversations, its servers as agents, and graders that agree with its."""
