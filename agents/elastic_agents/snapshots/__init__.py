"""The snapshots that a node keeps for its workers.

``snapshot_store``  slots in memory, and copies to durable storage
``slots``           tracks which slot holds which snapshot
``copier``          starts and watches a copying process; ``copying`` is that process
``transfer``        sends a snapshot to another node
``durable_state``   what durable storage holds, as reported by workers and copier
"""
