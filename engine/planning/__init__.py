"""Planning: decides what the next step computes, and applies its result. Plain Python, without tensors."""
