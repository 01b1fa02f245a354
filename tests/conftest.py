"""Settings that all tests share."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ddlab", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ddlab")
torch.set_num_threads(1)  # the tests run in one process per core
