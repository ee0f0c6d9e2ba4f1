"""The control record kept by a majority of named hosts: one register, as Paxos keeps it.

``messages``   what is asked of a voter, and its answer
``voter``      one voter: its promises and its accepted value; a pure machine
``register``   the other side: reads and writes the value through a majority; a pure machine
``vote_file``  a voter's state on disk
``server``     answers for a voter at its endpoint
``peers``      connections to the other voters
"""
