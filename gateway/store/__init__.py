"""State that outlives a connection or a process, or is shared by several: one interface, in memory and in Redis."""
