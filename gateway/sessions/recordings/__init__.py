"""Replies that outlive their connection, and their server: numbered events, kept and journalled."""
