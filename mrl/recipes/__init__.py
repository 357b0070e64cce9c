"""Recipes of `python -m mrl.prepare`: models and data for first runs. No training run imports them."""
