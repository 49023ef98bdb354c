"""Ollama's API: chat completions under other names, in lines of JSON."""
