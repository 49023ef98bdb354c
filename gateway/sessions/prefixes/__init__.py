"""Which prefixes are cached here, told to the store and found again in it: hints, for the engine alone decides."""
