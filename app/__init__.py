"""The front door and the wiring: command line, settings, build, server, benchmark."""
