"""The store is told which prefixes are cached here, and asked who has others: hints, for the engine alone decides."""
