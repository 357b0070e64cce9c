"""Rewards and environments."""
