"""What the launcher needs of its process and operating system.

``program``          standard streams, early signals and the exit of a command
``interrupts``       Ctrl-C before there is something to clean up
``threads``          threads whose unexpected end is reported to the main loop
``writer_thread``    writes to consoles and files in a thread, through a bounded queue
``descriptors``      the limit on file descriptors
``private_files``    directories and files that other users cannot read or replace
``plain_text``       foreign text made safe for logs and terminals
``memory_groups``    control groups that limit memory
``termination_log``  the termination message that Kubernetes shows for a container
"""
