"""Megatron policy ranks. The only folder that imports megatron."""
