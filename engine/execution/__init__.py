"""How a plan becomes launches on a device, and how its tokens come back."""
