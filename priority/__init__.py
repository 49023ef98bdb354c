"""Who goes next. Pure: no torch, no asyncio, no clock of its own."""
