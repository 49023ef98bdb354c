"""The kernel table, the plain reference of every entry, and the faster implementations."""
