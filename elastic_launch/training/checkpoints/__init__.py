"""Saves a training's state, and resumes from it.

``checkpoint``         the user's settings: :class:`~elastic_launch.training.checkpoints.checkpoint.Checkpoint`
``manager``            decides when to save durably, and finds what to resume from
``resumed``            the state that a training resumes from, and whether it fits this training
``state``              what is saved: registered objects by name
``late``               what is registered after the training has begun
``step_start``         what a step began with, and what has changed since
``parts``              what can be registered
``sharded``            gathers what is sharded, and shards it again
``loading``            reads checkpoints in any program, and exports weights
``foreign``            a checkpoint of torch.distributed.checkpoint from another program
``start_from``         a training that begins from another training's checkpoint
``saving``             saves to memory every few steps, to durable storage from time to time
``memory``             snapshots in the node's memory
``split``              snapshots of sharded states that are split among the nodes
``kept_shards``        the shards that processes keep at a planned change, instead of a snapshot
``split_restore``      puts a state together from one
``snapshot_interval``  when the next snapshot is due
``branches``           which state is the newest after restarts
``frozen``             frozen weights that are not saved
``pruned``             prunes a model as its saved state
``matching``           whether a saved state fits the objects that load it
``optimizer_loading``  loads an optimizer's state into the tensors that it has
``module_loading``     loads the state of a module that may have expanded tensors
``options``            options of optimizers and schedulers: the script's, and a saved state's
``schedules``          detects schedulers that are missing in a checkpoint
``shared_location``    which ranks use a location, and what all ranks read there
"""
