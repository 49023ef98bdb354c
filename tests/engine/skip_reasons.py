"""What tests need that a machine may lack, as they say it when they are skipped."""

TRITON = "needs Triton, which pip installs on Linux for x86-64 only"
