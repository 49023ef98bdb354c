"""The ground: connections and what HTTP itself asks of a server, whatever is asked over it."""
