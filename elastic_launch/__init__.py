"""Elastic, fault-tolerant launcher for PyTorch training.

``import elastic_launch`` alone imports no torch: whatever needs it is loaded on first use.
"""

__version__ = "0.1.0"
