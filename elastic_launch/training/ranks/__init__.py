"""The ranks of a training, and what they must agree on.

``world``           joining the process group, and leaving it
``mesh``            the ranks of a replica that divide a model
``place``           the place in a round, and the wait for it of a process that was started ahead
``agreement``       decisions that all ranks take at the same step boundary
``exchange``        messages, and a state sent to ranks that have none
``collectives``     finds what a script exchanges within a micro-batch
``spreading``       the same where each rank keeps only a part of it
``same_arguments``  checks that all ranks were given the same arguments
``replicas``        checks that all ranks have the same parameters
``pace``            finds ranks that are slower than the others
``checksum``        a fast checksum of tensors; ``digest`` is one of any value
``determinism``     torch's settings for bitwise equal results
"""
