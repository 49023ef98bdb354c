"""Access: API keys, quotas, and idempotent requests."""
