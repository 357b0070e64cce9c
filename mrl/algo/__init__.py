"""Advantages, losses, KL. Pure torch functions."""
