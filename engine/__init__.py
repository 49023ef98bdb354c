"""The model at work: plan, execute, commit. Knows no web, no Redis, no metrics."""
