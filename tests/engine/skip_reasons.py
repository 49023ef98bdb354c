"""Reasons for skipping tests on machines that lack something."""

TRITON = "needs Triton, which pip installs on Linux for x86-64 only"
