"""The one rule by which a token is chosen from a row of logits, and what the rule has to know of each sequence."""
