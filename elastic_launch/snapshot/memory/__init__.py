"""Snapshots in a node's memory.

``slot``           shared memory that holds one snapshot and outlives its writer
``slot_state``     a state written to a slot, and read back
``staging``        copies from a GPU while it computes
"""
