"""One command for a machine with a GPU: its tests, its figures, and a report of them. See README.md."""
