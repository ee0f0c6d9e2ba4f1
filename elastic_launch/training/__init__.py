"""The worker's side: what a training script imports.

``session``      joins the run and leaves it; ``trainings`` are the trainings of one script
``loop``         ``run.steps``; ``steps`` is the step as a transaction
``trainer``      ``Trainer``, with ``callbacks`` and ``durations``
``dist``         ``elastic_launch.dist``, Composer's names
``data/``        loaders and samplers
``gradients/``   accumulation and reduction
``ranks/``       the world, and what its ranks agree on
``checkpoints/`` saving and resuming
``together``     several models and optimizers in one loop
``wrapped``      models that are refused
``kinds``        arguments of a wrong type are refused
``precision``    number formats
``randomness``   random state of a step
``stopping``     stop requests
``link``         the worker's end of the socket to its agent
"""
