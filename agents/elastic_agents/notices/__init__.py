"""Preemption notices: what tells a node, some seconds ahead, that it will be taken away.

``types``  a notice, the interface of a source, and times in documents
``watch``  which sources are watched, and a thread for each
``auto``   detects the cloud that this node is in
``aws``    EC2's instance metadata
``gcp``    Compute Engine's metadata server
``azure``  Azure's Scheduled Events
``local``  a file that appears, the end of a Slurm job
``http``   one bounded request to a metadata service

What a document means is decided by pure functions, which raise :class:`~elastic_agents.notices.types.Trouble` on what
the protocol does not know; a source that is in trouble says so once, and never harms the run.
"""

from elastic_agents.notices.types import Notice, Source, Trouble
from elastic_agents.notices.watch import NoticeWatch, watching

__all__ = ["Notice", "NoticeWatch", "Source", "Trouble", "watching"]
