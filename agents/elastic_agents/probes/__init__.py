"""Health of a node: HTTP probes for a supervisor such as the kubelet, metrics, and a test of the hardware.

``health``       the answers to HTTP requests
``pages``        the page of a run, output of ranks, metrics for Prometheus, and the status as JSON
``roster``       the run's nodes as its leader sees them, for the page and the status
``http_server``  the standard library's server, with bounds
``node_check``   a test of memory, arithmetic and disk before the node joins
"""
