# SPDX-License-Identifier: Apache-2.0
"""Renders the jobs that clusters run, as text. Pure."""
