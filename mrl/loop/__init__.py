"""What the training loop calls."""
