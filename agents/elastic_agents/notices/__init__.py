"""Preemption notices: the warning, some seconds ahead, that a node will be taken away.

``types``         a notice, the interface of a source, and the parsing of times
``notice_watch``  detects which sources this node has, and runs a thread for each
``aws``           EC2's instance metadata
``gcp``           Compute Engine's metadata server
``azure``         Azure's Scheduled Events
``slurm``         the end of a Slurm job
``file``          a file that appears
``http``          one bounded request to a metadata service

Pure functions parse the documents, and raise :class:`~elastic_agents.notices.types.Trouble` for anything that the
protocol does not define. A source in trouble reports it once, and never harms the run.
"""

from elastic_agents.notices.notice_watch import NoticeWatch, sources_of
from elastic_agents.notices.types import Notice, Source, Trouble

__all__ = ["Notice", "NoticeWatch", "Source", "Trouble", "sources_of"]
