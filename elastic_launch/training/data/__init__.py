"""The same samples in the same micro-batches at every world size.

``loader``       the loaders
``epochs``       what the library needs of them: the samples of each step, and their micro-batches
``samplers``     the sample at each position of an epoch
``streams``      shards as one dataset
``stateful``     loaders that have a state
``loader_processes``  what their processes draw
``permutation``  random order in constant memory
``batches``      fetches one micro-batch, in any process
``content``      hashes of a few samples, which ranks compare
``generators``   finds random generators that the library does not seed
"""
