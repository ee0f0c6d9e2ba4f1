"""The agent: what runs on a node and outlives its workers. Internal: import :mod:`elastic_launch` instead.

``main``          runs one node's part of a run
``agent``         NodeAgent: takes events, asks ``policy``, carries out its actions
``policy``        pure decisions, ``policy_ahead`` those about workers ahead; ``policy_types`` has events and actions
``parts``         what the agent works with
``node_state``    what the node knows of itself and its run
``exits``         what the ends of workers mean
``final_save``    what the node saves when it or the run ends
``lease_keeper``  renews the guard's lease, and has stopped workers go on
``status``        what the node says about itself
``host_watch``    how busy the node's host is
``inbox``         one queue for all events
``departure``     leaving the run before its end
``drill``         planned faults of this node's workers
``static_world``  a world of fixed size, without rendezvous
``torch_agent``   torch's own agent, for runs under a third-party rendezvous handler
``workers/``      worker processes
``warm/``         the fork server
``snapshots/``    in-memory snapshots and their copies
``notices/``      preemption notices
``hangs/``        workers that make no progress
``probes/``       health checks
``calls/``        runs started from Python
``reporting``     what the agent prints about orders
``step_events``   events about steps; ``timers`` estimate how long a step takes, and a start
``outcome``       how the node's part ended; ``summary`` is the final message of a failed run
``console``       the agent's own log lines; ``torch_events`` emits torch's events
``live_view``     the last rows of a terminal, which show the run
``output_sinks``  the consoles and files that output goes to
``child``         a child process, however it was started
``helpers``       starts helper processes with a safe import path
``priority``      lowers the priority of background work
``prctl``         what the kernel does for this process on request
"""
