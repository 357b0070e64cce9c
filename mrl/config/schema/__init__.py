"""The sections of a config: every key, its type, default and meaning."""
