"""A run on simulated hosts: real decisions, simulated time, network, store, processes and workers; no sleeping."""
