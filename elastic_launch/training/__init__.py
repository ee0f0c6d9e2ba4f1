"""The worker's side: what a training script imports.

``session``      joins and leaves the run
``engine``       what happens between two steps; ``trainings`` keeps track of the trainings of one script
``rounds``       the round that this worker is in, and whether it can go on in the next one
``loop``         ``run.steps``; ``loop_options`` its arguments
``steps``        the step as a script sees it; ``transaction`` is what it does, ``passes`` a pass of it
``positions``    where a loop's state can be handed on, and what the script changes between
``held``         what a script's code keeps outside of the attributes of modules
``purity``       whether micro-batches depend on those before them
``verification`` which steps are verified, by which ranks, and which one has computed wrong; ``verifying`` exchanges it
``flips``        flips bits, as a plan of faults says
``trainer``      ``Trainer``, with ``callbacks`` and ``durations``
``deepspeed``    a trainer's model in DeepSpeed's engine; ``deepspeed_config`` completes the configuration
``evaluations``  when to evaluate, and what came out; ``schedule`` steps learning-rate schedulers
``swapping``     lends a model the weights of its average
``plain``        ``report_step`` and ``should_stop``, for loops without a session
``dist``         ``elastic_launch.dist``, with Composer's names
``data/``        loaders and samplers
``gradients/``   accumulation and reduction
``ranks/``       the world, and agreement among its ranks
``checkpoints/`` saving and resuming
``together``     several models and optimizers in one loop
``wrapped``      detects models that cannot be trained
``kinds``        checks argument types
``randomness``   random state of a step
``stopping``     stop requests
``children``     the environment of a worker's programs, and processes that its session waits for
``live/``        rounds that end no process
``link``         the worker's end of the socket to its agent
"""
