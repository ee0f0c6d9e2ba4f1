"""The worker processes of one node.

``round_workers``      the workers of one round
``start``              starts them, one after the other
``placement``          a worker's command and environment
``processes``          starting, signalling and reaping processes
``sessions``           each worker's session, ended with its grandchildren
``guard``              kills the sessions if the agent dies; ``guard_process`` is its process
``control``            the agent's end of the workers' socket
``output``             their output
``logs``               log directories; ``logs_specs`` takes torchrun's
``failures``           what a dead worker left; ``symptoms`` tells causes from consequences
``stuck``              interpreters that hang in their lock at exit
``watchdog``           torch's timers
``numa``               CPU binding
``signal_forwarding``  which signals are passed on
"""
