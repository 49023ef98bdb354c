"""The objects, events and records of the Responses API."""
