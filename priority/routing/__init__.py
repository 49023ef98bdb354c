"""Which replica serves a request: what replicas say of themselves, who holds which prefix, and the choice."""
