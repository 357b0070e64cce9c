# SPDX-License-Identifier: Apache-2.0
"""Weights as data: canonical boxes, layouts of every holder, and the schedules between them. Imports nothing of mrl."""
