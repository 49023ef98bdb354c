"""The scheduler and the queue as they are served, on a virtual clock with a cost model in place of execution."""
