# SPDX-License-Identifier: Apache-2.0
"""The page of a run: its data, `report.html`, and the live view."""
