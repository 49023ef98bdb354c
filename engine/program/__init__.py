"""What a model does in a step: one list of operations, made of its description, and what runs it on each device."""
