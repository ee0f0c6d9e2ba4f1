"""Notices: what tells a node, some seconds ahead, that it is to go.

``notice``   what a notice is, and how times of documents are read
``http``     one bounded request to a metadata service
``aws``, ``gcp``, ``azure``   documents of the clouds, and who asks for them
``local``    a file that appears, the end of a Slurm job
``auto``     where this node is
``watch``    a thread for each source

What a document means is decided by pure functions, which raise :class:`~elastic_agents.notices.notice.Trouble` on what
the protocol does not know; a source that is in trouble says so once, and never harms the run.
"""

from elastic_agents.notices.notice import Notice, Source, Trouble
from elastic_agents.notices.watch import Watch, watching

__all__ = ["Notice", "Source", "Trouble", "Watch", "watching"]
