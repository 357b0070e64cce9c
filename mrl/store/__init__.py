# SPDX-License-Identifier: Apache-2.0
"""The run folder: checkpoints, ledger, metrics, loggers, report."""
