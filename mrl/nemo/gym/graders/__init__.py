# SPDX-License-Identifier: Apache-2.0
"""Built-in environments with the verdicts of NeMo Gym's resource servers; each module declares its own."""
