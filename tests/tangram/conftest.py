"""Shared settings of the plugin's tests."""

from hypothesis import settings

# Timings are not what these tests are about, and the machines that run them are shared.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
