"""Prompts in, packed batches out. Pure."""
