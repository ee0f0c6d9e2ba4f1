"""Durable checkpoints: directories, and URLs that fsspec opens.

``directory``    checkpoints in a directory
``url_storage``  checkpoints behind a URL, with the same methods
``saving``       writes and prunes
``listing``      finds checkpoints
``reading``      loads them
``background``   writes them in a thread
``shares``       one checkpoint written by several nodes
``owner``        which run a location belongs to
``lineage``      which run a checkpoint belongs to
"""
