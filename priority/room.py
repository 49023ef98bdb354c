"""Room: how long until KV and a seat are free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the running requests hold, and how fast they give it back."""

    num_running: int
    num_tokens: int
    """Of KV."""
    ends_s: float
    """Seconds until those that run have all their tokens, on average."""
    finished_per_s: float
    """Requests that ended, of late."""
    freed_per_s: float
    """Tokens of KV that they gave back."""

    def wait_s(self, missing_kv: float, missing_seats: float, num_victims: int) -> float:
        """Seconds until so much is free, which `num_victims` of the running give way for at once.

        The rest comes from those who end: as fast as they did of late, or as those who run will.
        """
        missing_kv -= num_victims * self.num_tokens / max(1, self.num_running)
        return max(
            _over(missing_kv, self.freed_per_s, self.num_tokens, self.ends_s),
            _over(missing_seats - num_victims, self.finished_per_s, self.num_running, self.ends_s),
        )


def _over(missing: float, rate: float, held: int, ends_s: float) -> float:
    """Seconds until what is missing was given back, at a rate, or by those who hold so much and end after so long."""
    rate = max(rate, held / ends_s if ends_s > 0 else 0.0)
    return missing / rate if missing > 0 and rate > 0 else 0.0
