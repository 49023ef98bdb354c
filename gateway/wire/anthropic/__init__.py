"""Anthropic's Messages API: chat completions under other names."""
