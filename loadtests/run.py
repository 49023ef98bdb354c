"""`make loadtest`: a minute of mixed traffic against a server of its own; fails on any failed request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loadtests.keys import key_file
from penstock.app.bench.server_process import ServerFailed, ServerProcess

USERS, RAMP_PER_S, DURATION = 16, 4, "1m"
TENANTS = ("ann", "bob", "cy")


def main(arguments: list[str]) -> int:
    """Runs locust with our users, and with whatever other options it is given; its exit status."""
    print("loadtest: starting a server", flush=True)
    try:
        with key_file(TENANTS) as (path, keys), ServerProcess(["--api-keys-file", path]) as server:
            print(f"loadtest: {USERS} users for {DURATION} on {server.url}", flush=True)
            tenants = ",".join(f"{name}={key}" for name, key in keys.items())
            environment = {**os.environ, "LOADTEST_TENANTS": tenants}
            return subprocess.run(command(server.url, arguments), check=False, env=environment).returncode
    except ServerFailed as error:
        print(f"loadtest: the server did not start: {error}", file=sys.stderr)
        return 2


def command(url: str, arguments: list[str]) -> list[str]:
    """locust with our users; what the arguments say again counts."""
    users = Path(__file__).with_name("locustfile.py")
    return [
        *(sys.executable, "-m", "locust", "--headless", "--only-summary", "--locustfile", str(users)),
        *("--host", url, "--users", str(USERS), "--spawn-rate", str(RAMP_PER_S), "--run-time", DURATION),
        *("--stop-timeout", "60", "--exit-code-on-error", "1"),
        *arguments,
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
