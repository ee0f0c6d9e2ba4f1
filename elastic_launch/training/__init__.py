"""The worker's side: what a training script imports, and nothing that an agent needs.

``world``       which world this process is in, and joining it
``tree``        the fixed order in which an exact reduction adds; pure
``reduction``   that reduction over the ranks
``randomness``  random state from (seed, step, micro-batch) and (seed, epoch, place of a micro-batch)
``permutation`` random orders and numbers that are computed position by position
``samplers``    which sample stands at each position of an epoch
``loader``      ElasticLoader and FunctionLoader: the same data in the same micro-batches at every world size
``batches``     fetching one micro-batch, in whatever process
``generators``  finding generators of random numbers that nothing restores
``ranks``       ranks and sizes, joined or not
``dist``        ranks, sizes and collectives under the names of Composer's module of that name
"""
