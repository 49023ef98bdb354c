"""State kept from one request to the next: recorded replies, responses, conversations, cached prefixes."""
