"""Maps memory, moves boxes, verifies (torch only)."""
