"""Preemption notices: the warning, some seconds ahead, that a node will be taken away.

``types``  a notice, the interface of a source, and the parsing of times
``watch``  selects the sources to watch, and runs a thread for each
``auto``   detects the cloud that this node is in
``aws``    EC2's instance metadata
``gcp``    Compute Engine's metadata server
``azure``  Azure's Scheduled Events
``local``  a file that appears, the end of a Slurm job
``http``   one bounded request to a metadata service

Pure functions parse the documents, and raise :class:`~elastic_agents.notices.types.Trouble` for anything that the
protocol does not define. A source in trouble reports it once, and never harms the run.
"""

from elastic_agents.notices.types import Notice, Source, Trouble
from elastic_agents.notices.watch import NoticeWatch, watching

__all__ = ["Notice", "NoticeWatch", "Source", "Trouble", "watching"]
