"""Several replicas behind one address: the switch that chooses among them, and their life on Ray Serve."""
