"""The launcher's interface to its process and the operating system.

``program``          standard streams, early signals and the exit of a command
``interrupts``       Ctrl-C while there is nothing to clean up yet
``threads``          threads whose unexpected end is reported to the main loop
``forks``            keeps signal handlers from processes that the script forks
``wake``             wakes a thread that waits in a selector
``writer_thread``    writes to consoles and files in a thread, through a bounded queue
``descriptors``      the limit on file descriptors
``whole_writes``     writes that are done as a whole
``private_files``    directories and files that other users cannot read or replace
``plain_text``       makes untrusted text safe for logs and terminals
``memory_groups``    control groups that limit memory
``host_load``        how busy a node's host is
``allowance``        limits of time that do not count waits for a CPU
``findings``         what ``elasticctl doctor`` finds, and the bound of its waits
``termination_log``  the termination message that Kubernetes shows for a container
"""
