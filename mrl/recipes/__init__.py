# SPDX-License-Identifier: Apache-2.0
"""Recipes of `python -m mrl.prepare`: models and data for first runs. No training run imports them."""
