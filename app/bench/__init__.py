"""`penstock bench`: this server against transformers' generate, and against what the machine can do."""
