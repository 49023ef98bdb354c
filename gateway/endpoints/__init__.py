"""The endpoints, by path."""
