"""`penstock check`: whether a model says what its weights say, and how fast."""
