"""The format of a checkpoint: a manifest, safetensors files and JSON, without pickle but in torch's format.

``manifest``      what a checkpoint must contain, and names of files and directories
``tree``          nested state as named tensors and JSON
``plain``         nested plain values as JSON
``small_values``  paths, times, exact numbers, ranges and enums as JSON
``arrays``        NumPy arrays and scalars
``dtypes``        supported tensor types, and their bytes
``tensor_file``   tensors as safetensors
``distributed``   tensors as torch.distributed.checkpoint writes them
``files``         single files, written with checksums, synced, and read without trust
"""
