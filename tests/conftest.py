"""What all tests share."""

from hypothesis import settings

# How long an example takes is the machine's affair: it may be doing other work.
settings.register_profile("spectool", deadline=None)
settings.load_profile("spectool")
