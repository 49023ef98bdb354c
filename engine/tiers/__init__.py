"""Tiers: places outside of the device's memory that keep the KV of blocks, and what goes there and comes back.

Plain Python without torch. `block_file` is what a block's bytes look like in a file and between replicas, `tier` what a
tier is, `host` and `disk` are two of them.
"""
