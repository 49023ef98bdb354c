"""Routing: the state that replicas push, the prefixes that they hold, and the choice of a replica."""
