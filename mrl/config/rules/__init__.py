"""What a config must satisfy before anything starts: ranges, and rules between keys."""
