"""The OpenAI format: from bodies to requests of the engine, and from its outputs to the bytes of a reply."""
