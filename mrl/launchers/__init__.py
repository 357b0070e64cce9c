"""Renders the jobs that clusters run, as text. Pure."""
