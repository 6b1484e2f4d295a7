"""Looking inside: rules and boards for Prometheus and Grafana, traces of requests, and the form of log lines."""
