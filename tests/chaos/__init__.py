"""Random plans of faults against real runs; ``make chaos`` runs many of them.

``plan``    what is done to a run: faults drawn from a seed
``strikes`` how each kind of fault is carried out
``scene``   one run under a plan, and what must hold at its end
``report``  the figures of many runs
"""
