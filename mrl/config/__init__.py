"""One dataclass per YAML section; loading, checks."""
