"""Turns the gradients of micro-batches into those of the global batch.

``parameters``    the parameters of a training
``accumulation``  one step's gradients, in default and in exact mode
``carried``       exact mode: refuses states carried from one micro-batch to the next
``buckets``       default mode: all-reduce in buckets during the last backward pass
``reduction``     exact mode: addition in a fixed tree
``tree``          that tree's arithmetic, without torch
``shards``        the tree's sums across ranks
``sharded``       those of models that ``fully_shard`` has sharded
``flat``          packs tensors into flat ones; the base of the reductions
``means``         means of losses and metrics over all micro-batches
``buffers``       buffers of micro-batches; ``buffer_rules`` chooses the rule for a buffer, or a frozen parameter
"""
