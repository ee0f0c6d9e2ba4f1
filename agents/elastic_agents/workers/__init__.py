"""The worker processes of one node.

``round_workers``      the workers of one round
``start``              starts them one after the other, with their round or ahead of one
``placement``          a worker's command and environment
``processes``          starts, signals and reaps processes
``sessions``           each worker's session, ended with its grandchildren
``guard``              kills the sessions if the agent dies, stops them if it stands; ``guard_process`` is its process
``lease``              until when they may run without a sign of life from the agent; pure
``control``            the agent's end of the workers' socket
``output``             the workers' output
``logs``               log directories; ``logs_specs`` supports torchrun's
``failures``           what a dead worker left behind
``mistakes``           whether its exception says that the script is wrong
``frames``             the frames of a stack, and which is of the user's code
``stuck``              detects interpreters that deadlock on the GIL at exit
``watchdog``           torch's timers
``numa``               CPU binding
"""
