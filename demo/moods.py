"""The beginnings, feelings and ends of stories."""

from demo.grammar import phrases

_PHRASES = phrases("moods")
OPENINGS: list[str] = _PHRASES["openings"]
CARRIED: list[str] = _PHRASES["carried"]
EPISODES: list[str] = _PHRASES["episodes"]
EPILOGUES: list[str] = _PHRASES["epilogues"]
NO_MORE: list[str] = _PHRASES["no_more"]
MOODS: dict[str, list[list[str]]] = _PHRASES["moods"]
"""Words for the mood, sentences of air, and endings."""
