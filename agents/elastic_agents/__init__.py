"""What runs on a node and outlives its workers. Internal: import :mod:`elastic_launch` instead.

``main``          runs one node's part of a run
``agent``         LocalElasticAgent: events in, ``policy`` asked, actions carried out
``policy``        pure decisions; ``policy_types`` are its events and actions
``inbox``         one queue for all events
``departure``     leaving the run before its end
``static_world``  a world of fixed size, without rendezvous
``torch_agent``   torch's own agent, under a foreign rendezvous handler
``workers/``      worker processes
``warm/``         the fork server
``snapshots/``    snapshots in memory and their copies
``notices/``      preemption notices
``probes/``       health checks
``calls/``        runs started from Python
``reporting``     what the agent prints about orders
``step_events``   events of steps; ``step_timer`` learns how long a step takes
``outcome``       how the node's part ended; ``summary`` is the last text on a failed run
``console``       the agent's own lines; ``torch_events`` are torch's events
``output_sinks``  consoles and files that output goes to
``helpers``       starts helper processes with a safe import path
``priority``      lets training go first
``dumpable``      whether other processes may inspect this one
"""
