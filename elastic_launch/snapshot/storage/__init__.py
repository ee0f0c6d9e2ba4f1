"""Durable checkpoints: directories, and URLs that fsspec opens.

``saving``       writes and prunes
``listing``      finds checkpoints
``reading``      loads them
``background``   writes them in a thread
``draft``        a directory that a rename turns into a checkpoint
``shares``       one checkpoint written by several nodes
``urls``         writing, listing and pruning behind a URL
``url_storage``  wraps fsspec
``owner``        which run a location belongs to
``lineage``      which run a checkpoint belongs to
"""
