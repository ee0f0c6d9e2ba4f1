"""Replaces a cluster in the tests: its schemas, its job controller, its DNS, and the kubelet on each node."""
