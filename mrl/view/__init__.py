# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what its files say, the advisories on it, `report.html`, and the live view."""
