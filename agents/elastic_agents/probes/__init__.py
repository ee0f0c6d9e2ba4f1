"""HTTP probes for a supervisor such as the kubelet.

``health``       the answers
``http_server``  a small bounded server
"""
