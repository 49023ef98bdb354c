"""Formats in which models call tools: a table of them, and one parser for each style."""
