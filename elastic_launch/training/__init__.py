"""The worker's side: what a training script imports, and nothing that an agent needs.

``world``       which world this process is in, and joining it
``tree``        the fixed order in which an exact reduction adds; pure
``reduction``   that reduction over the ranks
``randomness``  random state from (seed, step, micro-batch) and (seed, epoch, sample)
``loader``      ElasticLoader: the same samples in the same micro-batches at every world size
``ranks``       ranks and sizes, joined or not
``dist``        ranks, sizes and collectives under the names of Composer's module of that name
"""
