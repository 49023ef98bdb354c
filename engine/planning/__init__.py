"""What the next step computes, and what it meant: plain Python, without tensors."""
