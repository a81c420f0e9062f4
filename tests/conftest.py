"""Few examples a property, the same ones every time, and no clock: the tests run on small machines."""

from hypothesis import settings

settings.register_profile("headrank", max_examples=20, deadline=None, derandomize=True, database=None)
settings.load_profile("headrank")
