"""The native decoder: a whole step in one call that holds no GIL."""
