"""Worker processes that are forked from one that has done their imports: a start pays for a fork, not for torch.

``anew``      an agent's process begins anew as what workers can be forked from
``parting``   it imports torch, and forks the server
``planning``  what the server is to import
``imports``   what a script imports, read without running it
``loading``   the imports
``spying``    what they must not do, and how it is noticed
``server``    the process that imports and forks
``become``    how a forked process turns into a fresh ``python script.py``
``parked``    one that waits to do so
``client``    the agent's side

All but ``anew``, ``parked`` and ``client`` run in the server and its forks, and use the standard library only.
"""
