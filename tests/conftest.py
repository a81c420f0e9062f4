"""Few examples a property, the same ones every time, and no clock: the tests run on small machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: matrices are tiny here, and threads that wait for each other cost many times the work

from hypothesis import settings

settings.register_profile("headrank", max_examples=20, deadline=None, derandomize=True, database=None)
settings.load_profile("headrank")
