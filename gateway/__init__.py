"""HTTP and SSE: what clients see. Never imports torch."""
