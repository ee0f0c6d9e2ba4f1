"""The ledger of a run: what each incident cost, from the run's events.

``reading``    reads the event files of a run's directory
``chronicle``  the events of one host, round by round
``ledger``     incidents and goodput
``live``       the ledger of a run in progress
``report``     the ledger as text and as JSON
``document``   what the page shows; ``page`` has its HTML, style and script
``advice``     what to change after a run
``history``    how its figures went over time
``present``    how a node's part of a run is at a moment
``node_watch``  figures for those who watch a run
``metrics``    a node's metrics for Prometheus
``spans``      rounds and incidents as OpenTelemetry spans
"""
