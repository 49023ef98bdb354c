"""Prefixes in the store: those cached here and on other replicas. They are hints; only the engine decides."""
