"""Property tests try the same examples in every run, and take as long as the machine takes."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
