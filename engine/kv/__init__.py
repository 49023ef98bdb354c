"""KV blocks: the pool, the prefix index and block tables (planning), and the tensors (execution)."""
