"""The same samples in the same micro-batches at every world size.

``loader``       the loaders
``samplers``     which sample stands at each position of an epoch
``permutation``  random order in constant memory
``old_order``    the order of checkpoints made before ``permutation``
``batches``      fetches one micro-batch, in any process
``generators``   finds random generators that the library does not seed
``evaluation``   evaluation data, shared out over the ranks
"""
