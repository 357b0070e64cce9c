"""What `python -m mrl.prepare` makes and verifies: models and data for first runs. Needed by no training run."""
