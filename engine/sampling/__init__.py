"""The rule by which a token is chosen from a row of logits, and the state of each sequence that the rule needs."""
