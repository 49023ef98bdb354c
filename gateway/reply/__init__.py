"""Replies in the making: what the engine brought for one, and who reads it."""
