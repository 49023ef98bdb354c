"""The front door and the wiring: command line, settings, build, server, benchmark."""

import os

# Nothing that is imported here tells anybody of its use, unless the operator says that it may.
for _variable, _value in (
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("DO_NOT_TRACK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_variable, _value)
