"""Saving a training's state, and resuming from it.

``checkpoint``         the user's :class:`~elastic_launch.training.checkpoints.checkpoint.Checkpoint`
``state``              what is saved: registered objects by name
``saving``             to memory every few steps, to durable storage now and then
``memory``             snapshots in the node's memory
``snapshot_interval``  when the next one is due
``branches``           which state is the newest after restarts
``matching``           whether a saved state fits the objects that take it
``schedules``          schedulers that are missing in a checkpoint
``urls``               checkpoints behind a URL
``node_reads``         one read for each node
``shared_directory``   whether all nodes see one directory
"""
