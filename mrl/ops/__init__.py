# SPDX-License-Identifier: Apache-2.0
"""The operator's room: commands that check hosts, launch jobs, and show, compare, plan or replay runs."""
