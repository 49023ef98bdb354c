"""What is served under which path."""
