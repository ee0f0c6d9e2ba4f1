"""Worker processes that are forked from one that has done their imports: a start pays for a fork, not for torch.

``imports``  what a script imports, read without running it
``spying``   what those imports must not do, and how it is noticed
``server``   the process that imports and forks
``become``   how a forked process turns into a fresh ``python script.py``
``client``   the agent's side

All but ``client`` run in the server and its forks, and use the standard library only.
"""
